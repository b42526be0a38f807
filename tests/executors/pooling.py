"""Pool prompts with a local executor, and the same in transformers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, PoolingConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.request import FinishReason, Pool, Request
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from torch import Tensor
    from transformers import PreTrainedModel

    from infd.engine.executor import Executor
    from infd.request import Adapter
    from infd.scheduler.layout import Capacity
    from infd.scheduler.scheduler import Scheduled

    Array = npt.NDArray[Any]


def executor(
    directory: Path,
    *,
    rows: int = 3,
    step_tokens: int = 16,
    cache: int = 2**19,
    quantization: str = "none",
    dtype: str = "float32",
    **pooling: Any,
) -> LocalExecutor:
    """Return an executor of small steps, so that prompts are computed in chunks, beside others.

    pooling  settings of the table [pooling]
    """
    return LocalExecutor(
        Config(
            model=ModelConfig(path=str(directory), dtype=dtype, quantization=quantization),  # type: ignore[arg-type]
            device=DeviceConfig(kind="cpu", threads=1, kernel_cache=""),
            scheduler=SchedulerConfig(max_num_seqs=rows, step_tokens=step_tokens),
            cache=CacheConfig(bytes=cache, page_tokens=4),
            pooling=PoolingConfig(**pooling),
        )
    )


class Pooler:
    """Runs sequences to their ends, as the engine does."""

    def __init__(self, runs: Executor, capacity: Capacity, **options: Any) -> None:
        """options: of Scheduler."""
        self.runs = runs
        self.scheduler = Scheduler(capacity, **options)
        self.sequences: list[Sequence] = []
        self.computed = 0  # tokens

    async def preempting(self, prompt: list[int], *, after: int) -> Array:
        """Pool a prompt that is preempted once `after` tokens are computed."""
        seq = Sequence(Request(id="r", prompt=tuple(prompt), wants=(Pool("embed"),)))
        self.scheduler.add(seq)
        while (step := self.scheduler.plan()) is not None:
            self.scheduler.commit(step, await self.runs.forward(step.plan).sample())
            if seq.computed >= after and not seq.preemptions:
                self.scheduler.preempt(seq)
        assert seq.preemptions
        return self._numbers(seq)

    async def __call__(
        self, *wants: tuple[list[int], Pool], depth: int = 1, adapters: list[Adapter | None] | None = None
    ) -> list[Array]:
        """Pool prompts together; return [rows, width] of each. Raises the failure of one."""
        requests = [Request(id="r", prompt=tuple(prompt), wants=(pool,)) for prompt, pool in wants]
        self.sequences = [
            Sequence(request, adapter=adapter, prefix_root=repr(adapter).encode())
            for request, adapter in zip(requests, adapters or [None] * len(requests), strict=True)
        ]
        for seq in self.sequences:
            self.scheduler.add(seq)
        in_flight: deque[tuple[Scheduled, Any]] = deque()
        while True:
            while len(in_flight) < depth and (step := self.scheduler.plan()) is not None:
                self.computed += step.plan.tokens
                in_flight.append((step, self.runs.forward(step.plan).sample()))
            if not in_flight:
                break
            step, result = in_flight.popleft()
            self.scheduler.commit(step, await result)
            self.scheduler.verify()
        return [self._numbers(seq) for seq in self.sequences]

    @staticmethod
    def _numbers(seq: Sequence) -> Array:
        if seq.failure is not None:
            raise seq.failure
        assert seq.finish is FinishReason.STOP
        assert seq.pooling is not None
        assert seq.pooling.result is not None
        return np.frombuffer(seq.pooling.result.values, "<f4").reshape(-1, seq.pooling.result.width)


def states(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Return the hidden states [tokens, hidden] of transformers' model without its head."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0]


def reduced(hidden: Tensor, mode: str, skip: int = 0) -> Tensor:
    """Return the vector that sentence-transformers' `Pooling` gives, whose mask leaves out the first `skip` tokens."""
    kept = hidden[skip:]
    if mode == "weightedmean":
        weights = torch.arange(skip + 1, len(hidden) + 1)[:, None]
        return (kept * weights).sum(0) / weights.sum()
    return {
        "cls": hidden[0],
        "lasttoken": hidden[-1],
        "mean": kept.mean(0),
        "max": kept.amax(0),
        "mean_sqrt_len_tokens": kept.sum(0) / len(kept) ** 0.5,
    }[mode]


def cosine(ours: Array, theirs: Tensor) -> float:
    """Return the least cosine of two vectors, or of the rows of two matrices."""
    mine = torch.from_numpy(ours.copy()).double()
    return torch.nn.functional.cosine_similarity(mine, theirs.double(), dim=-1).min().item()
