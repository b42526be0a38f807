"""Sequences that change their regime of rotary angles while streams run: no answer changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from infd.request import FinishReason
from infd.scheduler.layout import CacheLayout, PageGroup, Regimes
from tests.engine.driving import ask, request, serving, until_steps
from tests.fakes import FakeExecutor, capacity, continuation

if TYPE_CHECKING:
    from infd.scheduler.plan import StepPlan

AT, NEW = 13, 20
GROUPS = (PageGroup(layers=(0,), page_tokens=4), PageGroup(layers=(1,), page_tokens=4, window=7))
LAYOUTS = (CacheLayout(GROUPS, regimes=Regimes(outgrown=AT)), CacheLayout(GROUPS, regimes=Regimes(prompt_over=AT)))
PROMPTS = [list(range(3, 3 + length)) for length in (AT - 1, 4, AT, AT + 1, 30, AT - 1, AT + 1)]


def device(layout: CacheLayout, depth: int, pages: int = 200) -> FakeExecutor:
    return FakeExecutor(capacity(layout, pages=pages, rows=6, step_tokens=16), depth=depth)


def right(layout: CacheLayout, prompt: list[int], choices: int = 1) -> dict[int, tuple[list[int], FinishReason]]:
    answers = (continuation(prompt, NEW, seed=choice, layout=layout) for choice in range(choices))
    return {choice: (answer, FinishReason.LENGTH) for choice, answer in enumerate(answers)}


@pytest.mark.parametrize("pages", [200, 32])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_streams_of_many_lengths_and_choices_continue_across_a_boundary(layout, depth, pages):
    async with serving(device(layout, depth, pages)) as engine:
        answers = await asyncio.gather(*(ask(engine, request(prompt, NEW, choices=2)) for prompt in PROMPTS))
        assert answers == [right(layout, prompt, 2) for prompt in PROMPTS]
        assert bool(engine.status().preemptions) is (pages < 200)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("faulty", range(0, 16, 3))
async def test_a_step_that_fails_near_a_boundary_is_repeated_in_the_right_regime(layout, depth, faulty):
    executor, left = device(layout, depth), [faulty]

    def fault(plan: StepPlan) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("once")

    executor.fault = fault
    async with serving(executor) as engine:
        answers = await asyncio.gather(*(ask(engine, request(prompt, NEW)) for prompt in PROMPTS))
        assert answers == [right(layout, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [3, 6, 9])
async def test_a_sequence_continues_after_sleep_in_the_regime_of_its_length(layout, depth, steps):
    async with serving(device(layout, depth)) as engine:
        asking = [asyncio.create_task(ask(engine, request(prompt, NEW))) for prompt in PROMPTS]
        await until_steps(engine, steps)
        await engine.control.sleep("keep").result()
        await engine.control.wake().result()
        assert await asyncio.gather(*asking) == [right(layout, prompt) for prompt in PROMPTS]
