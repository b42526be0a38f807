"""The local executor on real checkpoints: greedy answers are those of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.request import SamplingParams
from tests.runner.driving import generate, request
from tests.tiny import FAMILIES, continuation, oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEW = 16
PROMPTS = [[5, 17, 30, 99], list(range(20, 63)), [7], [(i * 37) % 190 + 3 for i in range(25)]]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("variant", FAMILIES)
async def test_greedy_answers_are_those_of_transformers(
    tiny: Callable[[str], Path], variant: str, depth: int, kind: Literal["cpu", "cuda"]
):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    directory = tiny(variant)
    runs = LocalExecutor(
        Config(
            model=ModelConfig(path=str(directory), dtype="float32"),
            device=DeviceConfig(kind=kind, threads=1, depth=depth),
            scheduler=SchedulerConfig(max_num_seqs=3, step_tokens=16),  # chunks, and a queue
            cache=CacheConfig(bytes=2**19, page_tokens=4),
        )
    )
    try:
        capacity = await runs.load()
        requests = [
            request(prompt, SamplingParams(max_tokens=NEW, temperature=0.0), name=str(i))
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = await generate(runs, capacity, requests, depth=depth)
    finally:
        await runs.close()

    model = oracle(directory)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        theirs, _ = continuation(model, prompt, NEW)
        assert answer == theirs
