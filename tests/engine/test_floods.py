"""Requests with 2,048 prompts beside short ones: they take turns, whosever they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from infd.request import Pool, Request
from tests.engine.driving import serving
from tests.fakes import FakeExecutor, capacity

if TYPE_CHECKING:
    from infd.engine.engine import Engine

INPUTS = 2048


def prompts(name: str, count: int, *, tenant: str = "") -> list[Request]:
    wants = (Pool("embed"),)
    return [
        Request(id=f"{name}-{number}", prompt=(5, 6, 7, 8 + number % 50), wants=wants, tenant=tenant)
        for number in range(count)
    ]


async def embed(engine: Engine, requests: list[Request]) -> int:
    """Pool the prompts; return the number of steps that ended from their arrival to the last one's end."""
    async with engine.admit(len(requests), 0) as ticket:
        before = engine.status().steps
        choices = await ticket.submit(*requests)
        ended = [index async for index, _ in choices]
        assert len(ended) == len(requests)
        return engine.status().steps - before


@pytest.mark.exhaustive
@pytest.mark.parametrize("tenant", ["", "another"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_short_request_takes_two_steps_beside_floods(tenant: str, depth: int):
    room = capacity(pages=512, rows=16, step_tokens=64, max_model_len=64)
    async with serving(FakeExecutor(room, depth=depth)) as engine:
        flood = [asyncio.create_task(embed(engine, prompts(f"flood{number}", INPUTS))) for number in range(2)]
        while engine.status().steps < 5:
            await asyncio.sleep(0)
        short = [replace(each, tenant=tenant) for each in prompts("short", 1)]

        took = [await embed(engine, short) for _ in range(8)]

        assert not any(task.done() for task in flood)
        assert max(took) <= 1 + depth, "its own step, and those in flight when it came"
        assert all(steps < 2 * INPUTS for steps in await asyncio.gather(*flood))


async def test_large_requests_take_turns_and_the_first_ends_first():
    room = capacity(pages=512, rows=4, step_tokens=64, max_model_len=64)
    ends: list[int] = []

    async def flood(engine: Engine, number: int) -> None:
        await embed(engine, prompts(f"flood{number}", 60))
        ends.append(number)

    async with serving(FakeExecutor(room)) as engine, asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(flood(engine, number))
            started = engine.status().steps
            while engine.status().steps < started + 3:  # the next one comes while these run
                await asyncio.sleep(0)

    assert ends == sorted(ends), "later requests do not starve earlier ones"
