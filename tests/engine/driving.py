"""An engine over an executor, and callers that read their answers to the end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from infd.config import Config, LiveConfig, SchedulerConfig
from infd.engine.engine import Engine
from infd.request import FinishReason, Generate, Request, SamplingParams, Score, Want
from infd.telemetry.metrics import Metrics
from tests.fakes import FakeExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.engine.executor import Executor
    from infd.engine.streams.stream import Choices


def request(
    prompt: list[int],
    max_tokens: int = 5,
    *,
    choices: int = 1,
    seed: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
):
    wants: list[Want] = []
    if max_tokens:
        wants.append(Generate(SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=logprobs)))
    if prompt_logprobs is not None:
        wants.append(Score(prompt_logprobs))
    return Request(id="r", prompt=tuple(prompt), wants=tuple(wants), choices=choices)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """Load the engine's model, and let the engine run while the block is open."""
    await engine.load()
    task = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    try:
        yield engine
    finally:
        await engine.close()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(executor: Executor | None = None, **scheduler: int) -> AsyncIterator[Engine]:
    """Run an engine that nothing may be left in when the block is closed."""
    engine = Engine(LiveConfig(Config(scheduler=SchedulerConfig(**scheduler))), executor or FakeExecutor(), Metrics())
    async with running(engine):
        yield engine
    nothing_is_left(engine)


def nothing_is_left(engine: Engine) -> None:
    engine.core.scheduler.verify()
    status = engine.status()
    assert status.pages_referenced == 0, "a page leaked"
    assert status.tickets == status.waiting == status.waiting_tokens == status.held == 0
    assert status.accepted == sum(status.terminal.values()), "a choice without its one terminal event"


async def until_steps(engine: Engine, count: int) -> None:
    while engine.status().steps < count:
        await asyncio.sleep(0)


async def collect(choices: Choices) -> dict[int, tuple[list[int], FinishReason | None]]:
    """Read every choice to its end."""
    tokens: dict[int, list[int]] = {}
    finish: dict[int, FinishReason | None] = {}
    async for index, delta in choices:
        assert index not in finish or finish[index] is None, "something came after the terminal event"
        tokens.setdefault(index, []).extend(delta.token_ids)
        finish[index] = delta.finish
    return {index: (tokens[index], finish[index]) for index in tokens}


async def ask(engine: Engine, *requests: Request) -> dict[int, tuple[list[int], FinishReason | None]]:
    async with engine.admit(sum(r.choices for r in requests), 0) as ticket:
        return await collect(await ticket.submit(*requests))
