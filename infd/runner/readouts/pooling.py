"""The readout that pools prompts: reduces hidden states to a vector, passes it through the model's head, and scales it.

The host scales the vectors: there are few, and a call of torch takes ten times as long.

A prompt computed in chunks is reduced chunk by chunk; between two chunks, one vector is kept for its row. Sums are
float32. Only the vectors of prompts that end in the step, and rows of tasks by token, are copied to the host.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from infd.errors import Fault, RequestFailed
from infd.request import Pool, Pooled, by_token, embeds, pick
from infd.runner.readouts.readout import Reading, Readout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.pooling import Pooling
    from infd.pooling import PoolingSettings
    from infd.pooling.settings import Reduction
    from infd.request import PoolTask
    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Selection
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Join, Span, StepResult

    Array = npt.NDArray[Any]

NOT_FINITE: Final = Fault.of(RequestFailed("the model's hidden states are not finite"))
ONE: Final = ("cls", "lasttoken")  # reductions that read one token of a prompt
MEANS: Final = ("mean", "weightedmean", "mean_sqrt_len_tokens")  # reductions that divide a sum
STORED: Final = np.dtype("<f4")  # of Pooled.values


class HeadRows(Struct, frozen=True):
    """A span of which rows pass through the head.

    span  index in the plan
    row   row of the persistent batch
    """

    span: int
    row: int
    pool: Pool
    rows: int


class Postprocessing(Struct, frozen=True):
    """The steps after the model's head: fewer dimensions, normalization, activation.

    dimensions  leading numbers that are kept; None: all
    """

    task: PoolTask
    dimensions: int | None
    normalize: bool
    activation: str

    @classmethod
    def of(cls, pool: Pool, settings: PoolingSettings) -> Postprocessing:
        if not embeds(pool.task):
            return cls(pool.task, None, False, "none" if pool.activation is False else settings.activation)
        normalize = settings.normalize if pool.normalize is None else pool.normalize
        return cls(pool.task, pool.dimensions, normalize, "none")

    @property
    def plain(self) -> bool:
        """Whether rows are normalized, and nothing else."""
        return self.normalize and self.dimensions is None

    def __call__(self, outputs: Tensor, kernels: Pooling) -> tuple[Array, Sequence[bool] | Array]:
        """Return the numbers [N, width] float32, and of each row whether the head's outputs are finite.

        outputs  of the model's head, [N, outputs] float32, on the host
        """
        if self.dimensions is not None:
            outputs = outputs[:, : self.dimensions]
        if not self.normalize:
            return self._activated(outputs.numpy()), np.isfinite(outputs.numpy()).all(-1)
        return kernels.normalized(outputs)

    def _activated(self, outputs: Array) -> Array:
        with np.errstate(all="ignore"):  # of prompts that fail, and of numbers that become 0 or infinite
            if self.activation == "softmax":
                powers = np.exp(outputs - outputs.max(-1, keepdims=True))
                outputs = powers / powers.sum(-1, keepdims=True)
            elif self.activation == "relu":
                outputs = np.maximum(outputs, 0)
            elif self.activation == "sigmoid":
                outputs = 1 / (1 + np.exp(-outputs))
        return outputs


class HeadOutputs(Struct, frozen=True):
    """The outputs of the model's head for prompts with the same Postprocessing.

    rows     by span: index in the plan, and number of rows
    outputs  [N, outputs] float32, span after span
    """

    rows: Sequence[tuple[int, int]]
    outputs: Tensor
    postprocessing: Postprocessing


class PooledPrompts(Reading):
    """The numbers of a step's prompts."""

    def __init__(self, parts: list[HeadOutputs], kernels: Pooling) -> None:
        self._parts = parts
        self._kernels = kernels

    def sample(self, mask: Array | None) -> None:
        """No-op: numbers do not depend on the mask."""

    def download(self, staging: Staging) -> None:
        self._parts = [replace(part, outputs=staging.down(part.outputs.contiguous())) for part in self._parts]

    def read(self, result: StepResult) -> None:
        for part in self._parts:
            write(result, part.rows, *part.postprocessing(part.outputs, self._kernels))


def write(result: StepResult, rows: Iterable[tuple[int, int]], values: Array, finite: Sequence[bool] | Array) -> None:
    """Write the numbers of spans into a step's result.

    rows    by span: index in the plan, and number of rows
    values  [N, width] float32, span after span
    finite  [N]: whether what the numbers were computed from is finite
    """
    values, end = values.astype(STORED, copy=False), 0
    for span, count in rows:
        begin, end = end, end + count
        if all(finite[begin:end]):
            result.pooled[span] = Pooled(values.shape[1], values[begin:end].tobytes())
        else:
            result.failed[span] = NOT_FINITE


class Prompts:
    """How each row's prompt is pooled: only of tasks by token, or only of the others."""

    def __init__(self, instance: Instance, *, by_token: bool) -> None:
        self._by_token = by_token
        self._settings = instance.pooling
        self._model = instance.model
        self._kernels = instance.ops.pooling
        self._upload = instance.rows.upload
        self._slots, self._adapters = instance.rows.slots, instance.adapters
        self._pools: dict[int, tuple[Pool, int]] = {}  # by row: how its prompt is pooled, and the prompt's tokens

    def stage(self, join: Join) -> None:
        pool = pick(Pool, join.wants)
        if pool is not None and by_token(pool.task) == self._by_token:
            self._pools[join.row] = pool, join.prompt_tokens
        else:
            self._pools.pop(join.row, None)

    def among(self, spans: Sequence[Span]) -> Iterator[tuple[int, Span, Pool, int]]:
        """Yield the spans that are pooled: index in the plan, span, how it is pooled, tokens of the prompt."""
        for index, span in enumerate(spans):
            if span.pools and (found := self._pools.get(span.row)) is not None:
                yield index, span, *found

    def finish(self, reads: Sequence[HeadRows], rows: Tensor) -> PooledPrompts:
        """Pass the rows of `reads`, one after the other, through the model's head.

        rows  [N, hidden] float32
        """
        alike: dict[Postprocessing, list[HeadRows]] = {}
        for read in reads:
            alike.setdefault(Postprocessing.of(read.pool, self._settings), []).append(read)
        parts = []
        for postprocessing, some in alike.items():
            outputs = rows
            if len(alike) > 1:
                ends = dict(zip([read.span for read in reads], accumulate(read.rows for read in reads), strict=True))
                places = [np.arange(ends[read.span] - read.rows, ends[read.span]) for read in some]
                outputs = rows[self._upload(np.concatenate(places))]
            if (head := self._model.pooling_head(postprocessing.task)) is not None:
                slots = np.repeat(self._slots[[read.row for read in some]], [read.rows for read in some])
                outputs = head(outputs, self._adapters.adapted(slots))
            owners = [(read.span, read.rows) for read in some]
            parts.append(HeadOutputs(owners, outputs, postprocessing))
        return PooledPrompts(parts, self._kernels)


class TokenPooling(Readout):
    """Computes `request.Pool` of tasks by token."""

    narrows = False

    def __init__(self, instance: Instance) -> None:
        self._prompts = Prompts(instance, by_token=True)
        self._reads: list[tuple[HeadRows, Span]] = []  # of the present step

    def stage(self, joins: Sequence[Join]) -> None:
        for join in joins:
            self._prompts.stage(join)

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        self._reads = []
        for index, span, pool, _ in self._prompts.among(spans):
            if (rows := span.start + span.count - max(span.start, pool.skip)) > 0:
                self._reads.append((HeadRows(index, span.row, pool, rows), span))
        return [
            offsets[read.span] + at for read, span in self._reads for at in range(span.count - read.rows, span.count)
        ]

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> PooledPrompts:
        return self._prompts.finish([read for read, _ in self._reads], selection.of(hidden).float())


class TextPooling(Readout):
    """Computes `request.Pool` of the other tasks."""

    def __init__(self, instance: Instance) -> None:
        self._reduction: Reduction = instance.pooling.pooling
        self.narrows = self._reduction in ONE
        self._upload = instance.rows.upload
        self._sums = instance.ops.pooling.sums
        self._prompts = Prompts(instance, by_token=False)
        self._kept: dict[int, Tensor] = {}  # by row: [hidden] float32, the reduction of the prompt's earlier chunks
        # The spans of the present step of which tokens are read, as `Prompts.among`, and the positions of these tokens.
        self._reads: list[tuple[int, Span, Pool, int, range]] = []

    def stage(self, joins: Sequence[Join]) -> None:
        for join in joins:
            self._kept.pop(join.row, None)
            self._prompts.stage(join)

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        self._reads = [
            (index, span, pool, prompt, read)
            for index, span, pool, prompt in self._prompts.among(spans)
            if (read := self._read(span, pool, prompt))
        ]
        return [offsets[index] + at - span.start for index, span, *_, read in self._reads for at in read]

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> PooledPrompts:
        divisors = [
            1.0 if span.start + span.count < prompt or span.row in self._kept else self._divisor(pool.skip, prompt)
            for _, span, pool, prompt, _ in self._reads
        ]
        vectors = self._reduced(selection.of(hidden), [read for *_, read in self._reads], divisors)
        ended: list[tuple[int, HeadRows]] = []
        for number, (index, span, pool, prompt, _) in enumerate(self._reads):
            ends = span.start + span.count == prompt
            if (kept := self._kept.pop(span.row, None)) is not None:
                joined = self._joined(kept, vectors[number])
                vectors[number] = joined / self._divisor(pool.skip, prompt) if ends else joined
            if ends:
                ended.append((number, HeadRows(index, span.row, pool, 1)))
            else:
                self._kept[span.row] = vectors[number].clone()
        if len(ended) < len(self._reads):
            vectors = vectors[self._upload(np.array([number for number, _ in ended], dtype=np.int64))]
        return self._prompts.finish([read for _, read in ended], vectors)

    def _read(self, span: Span, pool: Pool, prompt: int) -> range:
        """Return the positions of the tokens that are read of a span."""
        end = span.start + span.count
        if self._reduction not in ONE:
            return range(max(span.start, pool.skip), end)
        if self._reduction == "cls" and not span.start:
            return range(1)
        return range(end - 1, end) if end == prompt else range(0)

    def _reduced(self, states: Tensor, reads: Sequence[range], divisors: Sequence[float]) -> Tensor:
        """Return the reduction of each of S spans, [S, hidden] float32.

        states    [N, hidden], of the tokens that are read, and padding
        divisors  [S], of sums
        """
        counts = [len(read) for read in reads]
        if self._reduction == "max":
            return torch.stack([part.amax(0) for part in torch.split(states[: sum(counts)].float(), counts)])
        if self._reduction == "weightedmean":
            weights = np.concatenate([np.arange(read.start + 1, read.stop + 1, dtype=np.float32) for read in reads])
            states = states[: len(weights)].float() * self._upload(weights)[:, None]
        return self._sums(states, counts, divisors, self._upload)

    def _joined(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the reduction of two parts of a prompt."""
        if self._reduction == "max":
            return torch.maximum(before, after)
        return before if self._reduction == "cls" else before + after

    def _divisor(self, skip: int, prompt: int) -> float:
        """Return the divisor of the reduction of tokens [skip, prompt): not 1 if it is a mean."""
        if self._reduction not in MEANS:
            return 1.0
        if self._reduction == "weightedmean":
            return (prompt * (prompt + 1) - skip * (skip + 1)) / 2
        tokens = float(prompt - skip)
        return math.sqrt(tokens) if self._reduction == "mean_sqrt_len_tokens" else tokens
