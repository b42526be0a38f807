"""Sleep, wake and weights: memory comes and goes, and no step runs without it. The fake device asserts that."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infd.config import Config, LiveConfig, ServerConfig
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.errors import (
    Busy,
    CannotSleep,
    CheckpointError,
    NotReady,
    OutOfMemory,
    Overtaken,
    ServerStopped,
    WeightsInvalid,
    WrongState,
)
from infd.memory import Memory, MemoryPart, Residency
from infd.request import FinishReason
from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Metrics
from tests.engine.driving import ask, collect, nothing_is_left, request, running, until_steps
from tests.engine.lifecycle.test_pause import answer, turns
from tests.fakes import FakeExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RACES = 10_000 if os.environ.get("INFD_SOAK") else 100
WEIGHTS, CACHE = frozenset({MemoryPart.WEIGHTS}), frozenset({MemoryPart.CACHE})
NOTHING = Memory(weights=Residency.RELEASED, cache=Residency.RELEASED)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(*, depth: int = 1, clock: Clock | None = None, **server: Any) -> AsyncIterator[Engine]:
    live = LiveConfig(Config(server=ServerConfig(**server)))
    engine = Engine(live, FakeExecutor(depth=depth), Metrics(), clock=clock or Clock())
    async with running(engine):
        await turns()
        yield engine
    nothing_is_left(engine)


def sleep_state(engine: Engine) -> dict[str, float]:
    """Return vLLM's engine_sleep_state, by its label."""
    metrics = Metrics()
    metrics.gauges = engine.gauges
    families = text_string_to_metric_families(expose(metrics).decode())
    (family,) = (family for family in families if family.name == "vllm:engine_sleep_state")
    return {sample.labels["sleep_state"]: sample.value for sample in family.samples}


@pytest.mark.parametrize(("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")])
async def test_vllms_sleep_state_is_the_requested_level(level: int, state: str):
    states = {"awake": 0, "weights_offloaded": 0, "discard_all": 0}
    async with serving() as engine:
        assert sleep_state(engine) == {**states, "awake": 1}
        await engine.control.sleep(level=level).result()
        assert sleep_state(engine) == {**states, state: 1}
        await engine.control.wake(CACHE).result()
        awake = level == 1  # on a CPU that sleep gave nothing else back
        assert sleep_state(engine) == {**states, "awake" if awake else state: 1}
        await engine.control.wake().result()
        assert sleep_state(engine) == {**states, "awake": 1}


def fake(engine: Engine) -> FakeExecutor:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor


@pytest.mark.parametrize(("level", "depth"), [(1, 1), (2, 2)])
async def test_kept_requests_are_recomputed_and_continue_token_for_token(level: int, depth: int):
    async with serving(depth=depth) as engine:
        asking = [asyncio.create_task(ask(engine, request([i] * 9, 60))) for i in range(6)]
        for steps in (3, 9):
            await until_steps(engine, engine.status().steps + steps)
            move = engine.control.sleep("keep", level)
            await move.result()
            assert engine.lifecycle.state is State.SLEEPING
            assert (move.frozen, move.freed_bytes) == (6, 1000 * level)
            assert engine.executor.memory.released == (WEIGHTS | CACHE if level == 2 else CACHE)
            status = engine.status()
            assert (status.running, status.pages_referenced, status.pages_cached) == (0, 0, 0)
            await engine.control.wake().result()
            assert engine.executor.memory == Memory()
            assert engine.lifecycle.state is State.READY
        assert await asyncio.gather(*asking) == [answer([i] * 9, 60) for i in range(6)]


async def test_sleep_waits_for_requests_in_flight_or_aborts_them():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        move = engine.control.sleep("wait", 2)
        await turns(5)
        assert (engine.lifecycle.state, engine.executor.memory) == (State.PAUSED, Memory())
        assert await asking == answer([1], 40)
        await move.result()
        assert engine.executor.memory == NOTHING
        await engine.control.wake().result()

        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, engine.status().steps + 2)
        await engine.control.sleep("abort").result()
        assert (await asking)[0][1] is FinishReason.ABORT


async def test_waking_returns_to_the_earlier_state_and_resuming_to_readiness():
    async with serving() as engine:
        await engine.control.pause("keep", "reject").result()
        await engine.control.sleep(level=2).result()
        await engine.control.wake().result()
        assert engine.lifecycle.state is State.PAUSED
        assert "refused" in engine.lifecycle.reason
        await engine.control.sleep(level=2).result()
        await engine.control.resume().result()
        assert engine.lifecycle.state is State.READY
        await engine.control.sleep().result()
        await engine.control.pause("keep").result()
        assert (engine.lifecycle.state, engine.executor.memory) == (State.PAUSED, Memory())


@pytest.mark.parametrize("verb", ["wake", "resume"])
async def test_a_staged_wake_lets_no_step_run_before_all_memory_is_back(verb: str):
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        await engine.control.sleep("keep", 2).result()
        rouse = getattr(engine.control, verb)
        await rouse(WEIGHTS).result()
        assert engine.lifecycle.state is State.SLEEPING
        assert engine.executor.memory == Memory(cache=Residency.RELEASED)
        assert "weights awake" in engine.lifecycle.reason
        await rouse(WEIGHTS).result()
        assert engine.lifecycle.state is State.SLEEPING
        await rouse(CACHE).result()
        assert await asking == answer([1], 40)


@pytest.mark.parametrize("at_once", [False, True])
async def test_where_a_light_sleep_moves_weights_they_must_be_taken_back_too(at_once: bool):
    async with serving() as engine:
        fake(engine).parks = True
        asleep = engine.control.sleep(level=1)
        if not at_once:
            await asleep.result()
            assert engine.executor.memory == Memory(weights=Residency.PARKED, cache=Residency.RELEASED)
        woken = engine.control.wake(CACHE)
        with suppress(Overtaken):
            await asleep.result()
        await woken.result()
        assert engine.lifecycle.state is State.SLEEPING
        await engine.control.wake(WEIGHTS).result()
        assert (engine.lifecycle.state, engine.executor.memory) == (State.READY, Memory())


async def test_at_level_1_only_the_cache_is_restored():
    async with serving() as engine:
        await engine.control.sleep(level=1).result()
        await engine.control.wake(CACHE).result()
        assert engine.lifecycle.state is State.READY


async def test_sleep_deepens_and_is_not_made_lighter_by_sleeping_again():
    async with serving() as engine:
        await engine.control.sleep(level=1).result()
        await engine.control.sleep(level=2).result()
        assert engine.executor.memory == NOTHING
        again = engine.control.sleep(level=1)
        await again.result()
        assert (engine.executor.memory, again.target.level) == (NOTHING, 2)
        assert await engine.control.sleep(level=2).result(0), "nothing is left to do"
        await engine.control.wake(WEIGHTS).result()
        await engine.control.sleep(level=2).result()
        assert engine.executor.memory == NOTHING
        await engine.control.wake().result()
        assert await engine.control.wake().result(0)


async def test_a_failed_wake_leaves_it_asleep_and_can_be_tried_again():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        await engine.control.sleep("keep", 2).result()
        for verb in (engine.control.wake, engine.control.resume, engine.control.pause):
            fake(engine).wake_error = CheckpointError("/model: gone")
            with pytest.raises(CheckpointError, match="gone"):
                await verb().result()
            assert (engine.lifecycle.state, engine.executor.memory) == (State.SLEEPING, NOTHING)
            assert engine.lifecycle.reason == "could not wake: /model: gone"
            assert not asking.done()
        fake(engine).wake_error = None
        await engine.control.wake().result()
        assert await asking == answer([1], 40)


async def test_a_failed_sleep_keeps_cached_prefixes_and_computed_tokens():
    async with serving() as engine:
        await ask(engine, request([1] * 40, 5))
        asking = asyncio.create_task(ask(engine, request([2] * 9, 40)))
        await until_steps(engine, engine.status().steps + 3)
        fake(engine).sleep_error = OSError("too many open files")
        with pytest.raises(OSError, match="too many open files"):
            await engine.control.sleep("keep", 2).result()
        assert (engine.lifecycle.state, engine.executor.memory) == (State.PAUSED, Memory())
        assert engine.status().running == 1
        await engine.control.resume().result()
        async with engine.admit(1, 0) as ticket:
            assert await collect(await ticket.submit(request([1] * 40, 5))) == answer([1] * 40, 5)
            assert ticket.cached_tokens
        assert await asking == answer([2] * 9, 40)


async def test_a_sleeper_refuses_requests_unless_it_wakes_for_them():
    async with serving() as engine:
        await engine.control.sleep().result()
        with pytest.raises(NotReady, match="sleeping"):
            await ask(engine, request([1]))
        assert not engine.control.wakes_on_request
    async with serving(wake_on_request=True) as engine:
        await engine.control.sleep(level=2).result()
        assert engine.control.wakes_on_request
        assert await asyncio.gather(*(ask(engine, request([i])) for i in range(5))) == [
            answer([i], 5) for i in range(5)
        ]
        assert engine.lifecycle.state is State.READY


async def test_a_request_does_not_end_a_pause_behind_the_sleep():
    async with serving(wake_on_request=True) as engine:
        await engine.control.pause(new="reject").result()
        await engine.control.sleep().result()
        assert not engine.control.wakes_on_request
        with pytest.raises(NotReady):
            await ask(engine, request([1]))


async def test_a_request_held_while_a_paused_engine_falls_asleep_is_answered():
    async with serving() as engine:
        await engine.control.pause().result()
        held = asyncio.create_task(ask(engine, request([1])))
        await turns()
        await engine.control.sleep(level=2).result()
        await engine.control.wake().result()
        assert engine.status().held == 1
        await engine.control.resume().result()
        assert await held == answer([1], 5)


async def test_a_request_waits_for_a_waking_engine_only_so_long():
    async with serving(wake_on_request=True, hold_timeout_s=0.01) as engine:
        await engine.control.sleep().result()
        fake(engine).memory_gate.clear()
        with pytest.raises(NotReady, match="hold_timeout_s"):
            await ask(engine, request([1]))
        fake(engine).memory_gate.set()
        await engine.control.wake().result()


async def test_a_request_whose_wake_fails_gets_the_reason_and_the_next_tries_again():
    async with serving(wake_on_request=True) as engine:
        await engine.control.sleep(level=2).result()
        fake(engine).wake_error = OutOfMemory("no room")
        with pytest.raises(NotReady, match="no room"):
            await ask(engine, request([1]))
        assert engine.lifecycle.state is State.SLEEPING
        fake(engine).wake_error = None
        assert await ask(engine, request([1])) == answer([1], 5)


async def test_an_idle_engine_falls_asleep_and_wakes_for_the_next_request():
    clock = Clock()
    async with serving(clock=clock, idle_sleep_s=60.0, idle_sleep_level=2) as engine:
        async with engine.admit(1, 0) as ticket:
            for clock.now in (0.0, 100.0, 200.0):
                engine.watch()
            assert engine.control.target.state is State.READY, "a request is in flight"
            await collect(await ticket.submit(request([1])))
        engine.watch()
        clock.now = 250.0
        await ask(engine, request([1]))
        clock.now = 261.0
        engine.watch()
        await turns()
        assert engine.lifecycle.state is State.READY, "a request arrived since"
        clock.now = 321.0
        engine.watch()
        await turns()
        assert (engine.lifecycle.state, engine.executor.memory) == (State.SLEEPING, NOTHING)
        assert "by itself" in engine.lifecycle.reason
        assert await ask(engine, request([2])) == answer([2], 5)
        assert engine.lifecycle.state is State.READY


async def test_an_operators_sleep_is_not_ended_by_the_automatic_wake():
    clock = Clock()
    async with serving(clock=clock, idle_sleep_s=60.0) as engine:
        for clock.now in (0.0, 61.0):
            engine.watch()
        await turns()
        assert engine.control.wakes_on_request
        await engine.control.sleep().result()
        assert not engine.control.wakes_on_request


async def test_a_drain_ends_sleepers_at_once():
    async with serving(wake_on_request=True) as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        await engine.control.sleep("keep", 2).result()
        fake(engine).memory_gate.clear()
        held = asyncio.create_task(ask(engine, request([2])))
        await turns()
        waking = engine.control.wake()
        assert await engine.drain(60)
        assert (await asking)[0][1] is FinishReason.ERROR
        with pytest.raises(NotReady, match="draining"):
            await held
        with pytest.raises(Overtaken, match="draining"):
            await waking.result()


async def test_sleep_overtakes_a_wake_and_a_wake_sleep():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        for _ in range(3):
            engine.control.sleep("keep", 2)
            await turns(3)
            engine.control.wake()
            engine.control.sleep("keep", 1)
            await turns(2)
        await engine.control.sleep("keep", 1).result()
        assert MemoryPart.CACHE in engine.executor.memory.released
        await engine.control.wake().result()
        assert await asking == answer([1], 40)


async def test_a_device_that_keeps_its_memory_is_not_put_to_sleep():
    async with serving(idle_sleep_s=1.0) as engine:
        fake(engine).sleep_refusal = "memory of cuda:0 is not given back yet"
        with pytest.raises(CannotSleep, match="cuda:0"):
            engine.control.sleep()
        assert await ask(engine, request([1])) == answer([1], 5)


async def test_weights_are_loaded_at_rest_only():
    async with serving() as engine:
        with pytest.raises(WrongState, match="infdctl pause"):
            await engine.control.load_weights("/other").result()
        asking = asyncio.create_task(ask(engine, request([1], 60)))
        await until_steps(engine, 2)
        engine.control.pause("wait")
        with pytest.raises(WrongState):
            await engine.control.load_weights("/other").result()
        assert await asking == answer([1], 60)
        await engine.control.pause("wait").result()
        await engine.control.load_weights("/other").result()


async def test_no_request_reuses_pages_computed_with_the_old_weights():
    async with serving() as engine:
        await ask(engine, request([1] * 40, 5))
        frozen = asyncio.create_task(ask(engine, request([2] * 40, 60)))
        await until_steps(engine, engine.status().steps + 3)
        await engine.control.pause("keep").result()
        await engine.control.load_weights("/other").result()
        assert engine.status().pages_cached == 0
        await engine.control.resume().result()
        for prompt in ([1] * 40, [2] * 40):
            async with engine.admit(1, 0) as ticket:
                assert await collect(await ticket.submit(request(prompt, 5))) == answer(prompt, 5)
                assert ticket.cached_tokens == 0
        assert await frozen == answer([2] * 40, 60)


async def test_weights_that_do_not_fit_change_nothing():
    async with serving() as engine:
        await ask(engine, request([1] * 40, 5))
        await engine.control.pause().result()
        fake(engine).weights_error = CheckpointError("/other: left over")
        with pytest.raises(CheckpointError, match="left over"):
            await engine.control.load_weights("/other").result()
        assert engine.executor.memory == Memory()
        assert engine.status().pages_cached
        await engine.control.resume().result()
        assert await ask(engine, request([1] * 40, 5)) == answer([1] * 40, 5)


async def test_weights_that_fail_midway_are_never_served():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        await engine.control.pause("keep").result()
        fake(engine).weights_error, fake(engine).fails_midway = CheckpointError("became shorter"), True
        with pytest.raises(CheckpointError):
            await engine.control.load_weights("/other").result()
        assert engine.status().weights == "invalid"
        assert "load good ones" in engine.lifecycle.reason
        for verb in (engine.control.resume, engine.control.wake, engine.control.pause):
            steps = engine.status().steps
            if verb == engine.control.wake:
                await verb().result()  # it is awake, and stays paused
            else:
                with pytest.raises(WeightsInvalid):
                    await verb().result()
            assert (engine.lifecycle.state, engine.status().steps) == (State.PAUSED, steps)
        fake(engine).weights_error = None
        await engine.control.load_weights("/other").result()
        await engine.control.resume().result()
        assert await asking == answer([1], 40)


async def test_a_resume_during_load_weights_waits_for_it():
    async with serving() as engine:
        await engine.control.pause().result()
        fake(engine).memory_gate.clear()
        loading = engine.control.load_weights("/other")
        await turns()
        with pytest.raises(Busy):
            engine.control.load_weights("/third")
        resuming = engine.control.resume()
        assert not await resuming.result(0)
        assert engine.busy
        fake(engine).memory_gate.set()
        await loading.result()
        await resuming.result()
        assert await ask(engine, request([1])) == answer([1], 5)


async def test_a_sleeper_can_be_given_other_weights_before_it_wakes():
    async with serving() as engine:
        await engine.control.sleep(level=2).result()
        await engine.control.load_weights("/other").result()
        assert engine.executor.memory == Memory(cache=Residency.RELEASED)
        await engine.control.wake(CACHE).result()
        assert await ask(engine, request([1])) == answer([1], 5)


async def test_the_wait_for_weights_fails_if_the_engine_ends():
    async with serving() as engine:
        await engine.control.pause().result()
        fake(engine).memory_gate.clear()
        loading = engine.control.load_weights("/other")
        await turns()
        assert await engine.drain(60)
        with pytest.raises(Overtaken, match="draining"):
            await loading.result()


async def test_sleep_and_wake_racing_requests_lose_no_request():
    chance = random.Random(7)
    async with serving(depth=2, wake_on_request=True) as engine:
        refused = 0
        for _ in range(RACES):
            prompts = [[chance.randrange(5)] * chance.randrange(1, 30) for _ in range(4)]
            asking = [asyncio.create_task(ask(engine, request(prompt, 12))) for prompt in prompts]
            await turns(chance.randrange(8))
            moves = [engine.control.sleep(chance.choice(["wait", "keep"]), chance.choice([1, 2]))]
            await turns(chance.randrange(8))
            if chance.random() < 0.5:
                moves.append(engine.control.wake())
            await turns(chance.randrange(8))
            asking.append(asyncio.create_task(ask(engine, request([7], 3))))
            results = asyncio.gather(*asking, return_exceptions=True)
            while not results.done():  # kept requests stay asleep until a wake
                await turns(5)
                if engine.lifecycle.state is State.SLEEPING:
                    engine.control.wake()
            for prompt, got in zip([*prompts, [7]], await results, strict=True):
                if isinstance(got, NotReady):
                    refused += 1
                else:
                    assert got == answer(prompt, 3 if prompt == [7] else 12)
            await asyncio.gather(*(move.result() for move in moves), return_exceptions=True)
        assert refused == 0, "a sleeper that wakes for requests refuses none"
        assert engine.status().accepted == 5 * RACES
        await engine.control.resume().result()


async def test_a_wake_under_way_does_not_open_the_gate_of_a_draining_engine():
    async with serving() as engine:
        await engine.control.sleep().result()
        fake(engine).memory_gate.clear()
        wake = engine.control.wake()
        while not engine.control.changing_memory:
            await asyncio.sleep(0)
        engine.lifecycle.enter(State.DRAINING)
        engine.fail_all(ServerStopped())
        fake(engine).memory_gate.set()
        with pytest.raises(Overtaken):
            await wake.result(0)
        await asyncio.sleep(0)
        assert engine.lifecycle.state is State.DRAINING
