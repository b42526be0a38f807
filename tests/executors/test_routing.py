"""The experts that a local executor reports are the router indices of transformers, however steps are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.request import Generate, Request, Route, SamplingParams, Score, Want
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from tests.runner.driving import finish
from tests.tiny import oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

PROMPTS = ([(i * 37) % 190 + 3 for i in range(25)], [5, 17, 30, 99], list(range(20, 63)))
NEW = 7


def chosen(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the experts [tokens, layers, k] that transformers chooses, in ascending order."""
    found, hooks = [], []
    for module in model.modules():
        if type(module).__name__.lower().endswith("router"):

            def keep(module: torch.nn.Module, _: object, output: tuple[Tensor, ...]) -> None:
                found.append(output[2] if len(output) == 3 else output[0].topk(module.top_k).indices)

            hooks.append(module.register_forward_hook(keep))
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("variant", "depth"),
    [("qwen3-moe", 1), ("qwen3-moe", 2), ("mixtral", 1), ("glm4-moe", 1), ("gpt-oss", 1), ("llama4", 2)],
)
async def test_experts_are_those_of_transformers(
    tiny: Callable[[str], Path], variant: str, depth: int, kind: Literal["cpu", "cuda"]
):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    runs = LocalExecutor(
        Config(
            model=ModelConfig(path=str(tiny(variant)), dtype="float32"),
            device=DeviceConfig(kind=kind, threads=1, depth=depth, kernel_cache=""),
            scheduler=SchedulerConfig(max_num_seqs=3, step_tokens=16),  # chunks, and a queue
            cache=CacheConfig(bytes=2**19, page_tokens=4),
        )
    )
    wants: tuple[Want, ...] = (Generate(SamplingParams(max_tokens=NEW, temperature=0.0)),)
    requests = [
        Request(id="r", prompt=tuple(prompt), wants=(*wants, *more))
        for prompt, more in zip((*PROMPTS, PROMPTS[0]), ((Route(),), (), (Route(), Score()), (Route(),)), strict=True)
    ]
    sequences = [Sequence(each) for each in requests]
    try:
        capacity = await runs.load()
        scheduler = Scheduler(capacity)
        await finish(runs, scheduler, sequences, depth=depth)
        again = Sequence(requests[0])
        scheduler.add(again)
        while (step := scheduler.plan()) is not None:
            scheduler.commit(step, await runs.forward(step.plan).sample())
            if again.generated == 3 and not again.preemptions:
                scheduler.preempt(again)
    finally:
        await runs.close()

    assert again.preemptions
    assert capacity.experts is not None
    model = oracle(tiny(variant))
    for seq in (*sequences, again):
        if seq.routing is None:
            continue
        report = seq.routing.report(seq.generated)
        assert report is not None
        ours = np.frombuffer(report.values, "<i2").reshape(report.tokens, report.layers, report.chosen)
        assert (capacity.experts.layers, capacity.experts.chosen) == (report.layers, report.chosen)
        assert torch.from_numpy(ours.astype(np.int64)).sort(-1).values.equal(chosen(model, seq.tokens[:-1])), variant


async def test_a_model_without_experts_says_so(tiny: Callable[[str], Path]):
    runs = LocalExecutor(
        Config(
            model=ModelConfig(path=str(tiny("llama")), dtype="float32"),
            device=DeviceConfig(kind="cpu", threads=1, kernel_cache=""),
            cache=CacheConfig(bytes=2**19, page_tokens=4),
        )
    )
    try:
        assert (await runs.load()).experts is None
    finally:
        await runs.close()
