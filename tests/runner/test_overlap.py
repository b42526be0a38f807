"""A step is issued without waiting for the device, with any features of its rows."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.executors.local import LocalExecutor
from infd.request import SamplingParams
from infd.runner.pulse import Pulse
from infd.runner.start.loading import build
from infd.scheduler.plan import StepPlan
from tests.runner.driving import generate, join, request, span
from tests.waiting import unsynchronised

ASKED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {3: 4.0}},
    {"temperature": 0.5, "min_tokens": 5, "bad_words": ((5, 9), (8,)), "allowed_token_ids": tuple(range(50))},
    {"temperature": 0.0},
]
SCORED = [None, None, None, None, None, 2]  # as Score.top


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_two_steps_are_issued_before_anything_is_waited_for(tiny, kind, variant):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    runner = build(
        Config(
            model=ModelConfig(path=str(tiny(variant)), dtype="float32"),
            device=DeviceConfig(kind=kind, threads=1),
            scheduler=SchedulerConfig(max_num_seqs=8, step_tokens=128),
            cache=CacheConfig(bytes=2**21, page_tokens=4),
        ),
        Pulse(),
    ).runner
    joins, spans, page = [], [], 1
    groups = len(runner.instance.layout.groups)
    for row, (asked, scored) in enumerate(zip(ASKED, SCORED, strict=True)):
        prompt = [(7 * row + 3 * i) % 190 + 3 for i in range(5 + row)]
        tables = [list(range(page + 4 * group, page + 4 * group + 4)) for group in range(groups)]
        page += 4 * groups
        joins.append(join(row, prompt, tables, SamplingParams(max_tokens=9, **asked), scored=scored, seed=row))
        scores = 0 if scored is None else len(prompt) - 1
        spans.append(span(row, 0, len(prompt), scores=scores))
    following = [span(row, len(each.tokens), 1) for row, each in enumerate(joins)]
    with runner.active():
        with unsynchronised() if kind == "cuda" else nullcontext():
            steps = [
                runner.sample(runner.forward(StepPlan(number, *parts)))
                for number, parts in enumerate([(joins, [], spans), ([], [], following)])
            ]
        first, second = (runner.read(step) for step in steps)
    assert not first.failed
    assert not second.failed
    assert len(first.tokens) == len(second.tokens) == len(ASKED)


def test_torchs_warning_about_sync_debug_mode_does_not_reach_later_tests(monkeypatch):
    modes = []

    def switch(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 1:  # as torch does, once
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    with unsynchronised():
        assert modes == ["error"]
    assert modes == ["error", "default"]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_two_steps_in_flight_give_the_tokens_that_one_does(tiny, kind):
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    answers = []
    for depth in (1, 2):
        runs = LocalExecutor(
            Config(
                model=ModelConfig(path=str(tiny("qwen3")), dtype="float32"),
                device=DeviceConfig(kind=kind, threads=1, depth=depth),
                scheduler=SchedulerConfig(max_num_seqs=8, step_tokens=128),
                cache=CacheConfig(bytes=2**21, page_tokens=4),
            )
        )
        capacity = await runs.load()
        requests = [
            request(
                [(7 * row + 3 * i) % 190 + 3 for i in range(3 + row)], SamplingParams(max_tokens=24, **asked, seed=row)
            )
            for row, asked in enumerate(ASKED[:3])
        ]
        try:
            answers.append(await generate(runs, capacity, requests, depth=depth))
        finally:
            await runs.close()
    assert [len(tokens) for tokens in answers[0]] == [24] * 3
    assert answers[0] == answers[1]
