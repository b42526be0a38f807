"""Requests for adapters that do not fit into memory together take turns, within their deadlines and in order."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, LiveConfig, LoraConfig, SchedulerConfig, ServerConfig
from infd.engine.engine import Engine
from infd.errors import (
    Aborted,
    AdapterTooLarge,
    AdapterUnavailable,
    ModelNotFound,
    NotReady,
    QueueTimeout,
    RequestTimeout,
    ServerStopped,
)
from infd.request import FinishReason
from infd.telemetry.metrics import Metrics
from tests.engine.driving import ask, running
from tests.engine.test_adapters import MIB, answer, idle, no_adapter_is_left, request
from tests.fakes import FakeExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Answer = asyncio.Task[Any]


@asynccontextmanager
async def serving(*, room: int = 15, patience: int = 64, **server: Any) -> AsyncIterator[tuple[Engine, FakeExecutor]]:
    """Serve a, b and c, each of 10 MiB and the n-th generation. No step ends before the gate is opened."""
    executor = FakeExecutor(depth=2)
    executor.files.update(dict.fromkeys("abc", (10 * MIB, 1)))
    config = Config(
        lora=LoraConfig(host_bytes=room * MIB),
        scheduler=SchedulerConfig(priority_patience=patience),
        server=ServerConfig(**server),
    )
    engine = Engine(LiveConfig(config), executor, Metrics("base"), names=("base",))
    async with running(engine):
        for name in "abc":
            await engine.adapters.load(name, name)
        executor.gate.clear()
        yield engine, executor
        await idle(engine)
        no_adapter_is_left(engine)


async def begun(engine: Engine, name: str, seed: int = 1) -> Answer:
    """Ask, and return once the request holds its adapter or waits for it."""
    asking = asyncio.create_task(ask(engine, request([seed] * 9, name)))
    for _ in range(30):
        await asyncio.sleep(0)
    return asking


def in_use(engine: Engine) -> dict[str, int]:
    return {row.name: row.requests for row in engine.adapters.rows() if row.requests}


async def test_a_request_whose_adapter_does_not_fit_waits_until_another_adapter_is_unused():
    async with serving() as (engine, executor):
        first = await begun(engine, "a")
        second = await begun(engine, "b")
        assert in_use(engine) == {"a": 1}
        assert [row.state for row in engine.requests()] == ["running", "admitted"]
        with pytest.raises(
            AdapterTooLarge, match="unload others"
        ):  # an operator's load fails at once and does not wait
            await engine.adapters.load("d", "c")
        executor.gate.set()
        assert await asyncio.gather(first, second) == [answer([1] * 9, 1), answer([1] * 9, 2)]
        assert engine.adapters.bytes <= 15 * MIB


async def test_waiting_for_adapter_memory_counts_toward_the_queue_timeout():
    async with serving(queue_timeout_s=0.02) as (engine, executor):
        first = await begun(engine, "a")
        second = await begun(engine, "b")
        with pytest.raises(QueueTimeout):
            await second
        executor.gate.set()
        assert await first == answer([1] * 9, 1)
        assert engine.adapters.row("b").state == "stored"


async def test_of_two_deadlines_that_pass_the_earlier_is_reported():
    async with serving() as (engine, executor):
        first = await begun(engine, "a")
        second = await begun(engine, "b")
        ticket = engine.admission.find(engine.requests()[1].id)
        engine.admission.expire(ticket, QueueTimeout(1))
        await asyncio.sleep(0)
        engine.admission.expire(ticket, RequestTimeout(1))
        with pytest.raises(QueueTimeout):
            await second
        executor.gate.set()
        assert await first == answer([1] * 9, 1)


async def test_a_request_waiting_for_adapter_memory_is_refused_when_the_engine_fails():
    async with serving() as (engine, executor):
        first = await begun(engine, "a")
        second = await begun(engine, "b")
        engine.fail_all(ServerStopped())
        assert (await first)[0][1] is FinishReason.ERROR
        with pytest.raises(NotReady):
            await second
        executor.gate.set()


async def test_an_aborted_or_disconnected_waiter_lets_the_next_one_load():
    async with serving() as (engine, executor):
        first = await begun(engine, "a")
        aborted, left, last = [await begun(engine, name) for name in "bcb"]
        assert engine.abort(engine.requests()[1].id)
        with pytest.raises(Aborted):
            await aborted
        left.cancel()
        executor.gate.set()
        assert await asyncio.gather(first, last) == [answer([1] * 9, 1), answer([1] * 9, 2)]


async def test_a_waiting_request_is_overtaken_a_bounded_number_of_times():
    async with serving(patience=3) as (engine, executor):
        first = await begun(engine, "a")
        waiting = await begun(engine, "b")
        later = [await begun(engine, "a", seed) for seed in range(5)]
        assert in_use(engine) == {"a": 1 + 3}
        executor.gate.set()
        assert await asyncio.gather(first, waiting) == [answer([1] * 9, 1), answer([1] * 9, 2)]
        assert await asyncio.gather(*later) == [answer([seed] * 9, 1) for seed in range(5)]


async def test_a_request_whose_adapter_fits_does_not_wait_behind_one_that_does_not():
    async with serving(room=25) as (engine, executor):
        asking = [await begun(engine, name) for name in "abcab"]
        assert in_use(engine) == {"a": 2, "b": 2}
        executor.gate.set()
        assert await asyncio.gather(*asking) == [answer([1] * 9, generation) for generation in (1, 2, 3, 1, 2)]


async def test_a_request_stops_waiting_for_an_unloaded_adapter():
    async with serving() as (engine, executor):
        first = await begun(engine, "a")
        second = await begun(engine, "b")
        engine.adapters.unload("b")
        with pytest.raises(ModelNotFound):
            await second
        executor.gate.set()
        await first


async def test_an_adapter_that_has_grown_beyond_the_limit_is_refused():
    async with serving() as (engine, executor):
        first = await begun(engine, "a")
        executor.files["b"] = (20 * MIB, 2)
        with pytest.raises(AdapterUnavailable, match="cannot be read now"):
            await ask(engine, request([1], "b"))
        executor.gate.set()
        await first


async def test_a_waiting_pause_also_finishes_requests_that_wait_for_adapter_memory():
    async with serving() as (engine, executor):
        asking = [await begun(engine, name) for name in "abc"]
        pause = engine.control.pause("wait")
        executor.gate.set()
        await pause.result()
        assert [each.result() for each in asking] == [answer([1] * 9, generation) for generation in (1, 2, 3)]
        await engine.control.resume().result()


async def test_a_drain_also_answers_requests_that_wait_for_adapter_memory():
    async with serving() as (engine, executor):
        asking = [await begun(engine, name) for name in "ab"]
        draining = asyncio.create_task(engine.drain(60))
        executor.gate.set()
        assert await draining
        assert [each.result() for each in asking] == [answer([1] * 9, generation) for generation in (1, 2)]


async def test_with_memory_for_one_adapter_every_request_is_answered():
    chance = random.Random(3)
    async with serving(patience=2) as (engine, executor):
        executor.gate.set()
        names = [chance.choice("abc") for _ in range(60)]
        asking = [asyncio.create_task(ask(engine, request([seed] * 9, name))) for seed, name in enumerate(names)]
        for _ in range(8):
            await asyncio.sleep(0)
        for number in chance.sample(range(60), 10):
            asking[number].cancel()
        got = await asyncio.gather(*asking, return_exceptions=True)
        for seed, (name, each) in enumerate(zip(names, got, strict=True)):
            assert isinstance(each, asyncio.CancelledError) or each == answer([seed] * 9, "abc".index(name) + 1)
