"""Pause and resume: the latest target counts, and no request loses or gains a token by it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from infd.config import Config, LiveConfig, SchedulerConfig, ServerConfig
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.errors import (
    Aborted,
    DeviceLost,
    NotReady,
    Overloaded,
    Overtaken,
    QueueTimeout,
    ServerStopped,
    WrongState,
)
from infd.request import FinishReason
from infd.telemetry.metrics import Metrics
from tests.engine.driving import ask, collect, request, serving, until_steps
from tests.fakes import FakeExecutor, continuation

if TYPE_CHECKING:
    from infd.scheduler.plan import StepPlan


async def turns(count: int = 20) -> None:
    """Yield to all other tasks, several times."""
    for _ in range(count):
        await asyncio.sleep(0)


def answer(prompt: list[int], count: int) -> dict[int, tuple[list[int], FinishReason]]:
    return {0: (continuation(prompt, count), FinishReason.LENGTH)}


@pytest.mark.parametrize("depth", [1, 2])
async def test_kept_requests_continue_token_for_token(depth: int):
    executor = FakeExecutor(depth=depth)
    async with serving(executor) as engine:
        asking = [asyncio.create_task(ask(engine, request([i] * 9, 60))) for i in range(6)]
        for steps in (3, 7, 12):
            await until_steps(engine, steps)
            move = engine.control.pause("keep")
            await move.result()
            assert engine.lifecycle.state is State.PAUSED
            assert move.frozen == 6
            issued = len(executor.issued)
            await turns()
            assert len(executor.issued) == issued, "a step ran while paused"
            assert not any(task.done() for task in asking)
            await engine.control.resume().result()
        assert await asyncio.gather(*asking) == [answer([i] * 9, 60) for i in range(6)]


async def test_mode_wait_finishes_requests_in_flight_and_starts_no_other():
    async with serving() as engine:
        async with engine.admit(1, 0) as prepared:
            asking = asyncio.create_task(ask(engine, request([1], 40)))
            await until_steps(engine, 2)
            move = engine.control.pause("wait")
            late = asyncio.create_task(ask(engine, request([3], 5)))
            assert await asking == answer([1], 40)
            assert not await move.result(0), "an earlier request is not yet answered"
            assert await collect(await prepared.submit(request([2], 5))) == answer([2], 5)
        await move.result()
        assert (engine.status().held, late.done()) == (1, False)
        await engine.control.resume().result()
        assert await late == answer([3], 5)


async def test_mode_abort_ends_requests_in_flight_and_in_preparation():
    async with serving() as engine, engine.admit(1, 0) as prepared:
        asking = [asyncio.create_task(ask(engine, request([i], 100))) for i in range(3)]
        await until_steps(engine, 2)
        move = engine.control.pause("abort")
        await move.result()
        assert [answer[0][1] for answer in await asyncio.gather(*asking)] == [FinishReason.ABORT] * 3
        with pytest.raises(Aborted):
            await prepared.submit(request([1]))
        assert move.aborted == 4
        assert move.frozen == 0
        assert engine.status().terminal["abort"] == 3


async def test_a_request_aborted_during_preparation_is_aborted_once():
    async with serving() as engine, engine.admit(2, 0) as prepared:
        first = engine.control.pause("abort")
        await first.result()
        second = engine.control.pause("abort", "hold")
        await second.result()
        assert (first.aborted, second.aborted, second.frozen) == (2, 0, 0)
        await engine.control.pause("wait").result()  # it is nothing to wait for
        with pytest.raises(Aborted):
            await prepared.submit(request([1]))


async def test_a_request_in_preparation_at_the_pause_is_answered_after_it():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        await engine.control.pause("keep").result()
        choices = await ticket.submit(request([7], 4))
        await turns()
        assert not choices.ready
        engine.control.resume()
        assert await collect(choices) == answer([7], 4)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_new_requests_are_refused_if_the_pause_says_so(mode):
    async with serving() as engine:
        await engine.control.pause(mode, "reject").result()
        with pytest.raises(NotReady, match=r"paused: .* new requests are refused"):
            await ask(engine, request([1]))
        engine.control.resume()
        await turns()
        assert await ask(engine, request([1])) == answer([1], 5)


async def test_held_requests_are_refused_once_the_pause_refuses_new_ones():
    async with serving() as engine:
        await engine.control.pause(new="hold").result()
        held = asyncio.create_task(ask(engine, request([1])))
        await turns()
        assert engine.status().held == 1
        await engine.control.pause(new="reject").result()
        with pytest.raises(NotReady):
            await held
        assert engine.status().held == 0


async def test_held_requests_are_admitted_in_order_of_arrival():
    async with serving() as engine:
        await engine.control.pause().result()
        came_in: list[int] = []

        async def come(number: int) -> None:
            async with engine.admit(1, 0):
                came_in.append(number)

        waiting = [asyncio.create_task(come(number)) for number in range(20)]
        await turns()
        assert (came_in, engine.status().held) == ([], 20)
        engine.control.resume()
        await asyncio.gather(*waiting)
        assert came_in == list(range(20))


async def test_the_held_are_bounded_as_the_queue_is():
    async with serving(max_waiting=2) as engine:
        await engine.control.pause().result()
        held = [asyncio.create_task(ask(engine, request([i]))) for i in range(2)]
        await turns()
        with pytest.raises(Overloaded):
            await ask(engine, request([9]))
        engine.control.resume()
        await asyncio.gather(*held)


async def resting(**server: float) -> tuple[Engine, asyncio.Task[None]]:
    engine = Engine(LiveConfig(Config(server=ServerConfig(**server))), FakeExecutor(), Metrics())
    await engine.load()
    running = asyncio.create_task(engine.run())
    await turns()
    await engine.control.pause().result()
    return engine, running


@pytest.mark.parametrize(
    ("settings", "error"), [({"hold_timeout_s": 0.01}, NotReady), ({"queue_timeout_s": 0.01}, QueueTimeout)]
)
async def test_a_held_request_has_a_deadline(settings: dict[str, float], error: type[Exception]):
    engine, running = await resting(**settings)
    with pytest.raises(error):
        await ask(engine, request([1]))
    assert engine.status().held == engine.status().tickets == 0
    await engine.close()
    await running


async def test_a_held_request_can_be_aborted_or_leave_and_its_place_is_free_again():
    async with serving(max_waiting=2) as engine:
        await engine.control.pause().result()
        held = [asyncio.create_task(ask(engine, request([i]))) for i in range(2)]
        await turns()
        assert engine.abort(engine.requests()[0].id)
        held[1].cancel()
        results = await asyncio.gather(*held, return_exceptions=True)
        assert [type(result) for result in results] == [Aborted, asyncio.CancelledError]
        assert engine.status().held == engine.status().waiting == 0


async def test_a_second_pause_changes_the_mode_of_the_first():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 200)))
        await until_steps(engine, 2)
        waits = engine.control.pause("wait")
        await turns(4)
        await engine.control.pause("keep").result()
        with pytest.raises(Overtaken):
            await waits.result()
        steps = engine.status().steps
        waits = engine.control.pause("wait")
        await until_steps(engine, steps + 3)
        await engine.control.pause("keep").result()
        assert not asking.done()
        move = engine.control.pause("abort")
        await move.result()
        assert (await asking)[0][1] is FinishReason.ABORT
        assert (move.aborted, engine.lifecycle.state) == (1, State.PAUSED)
        with pytest.raises(Overtaken):
            await waits.result()


async def test_a_target_that_is_reached_already_changes_nothing():
    async with serving() as engine:
        resume = engine.control.resume()
        assert await resume.result(0)
        assert engine.lifecycle.state is State.READY

        asking = asyncio.create_task(ask(engine, request([1], 200)))
        await until_steps(engine, 2)
        first = engine.control.pause("keep")
        assert engine.control.pause("keep") is first, "both wait for the one transition"
        await first.result()
        since, again = engine.lifecycle.since, engine.control.pause("keep")
        assert again is not first
        assert await again.result(0)
        assert engine.lifecycle.since == since
        await engine.control.resume().result()
        await asking


async def test_a_resume_overtakes_a_pause_that_still_waits():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 60)))
        await until_steps(engine, 2)
        move = engine.control.pause("wait")
        await engine.control.resume().result()
        with pytest.raises(Overtaken):
            await move.result()
        assert engine.lifecycle.state is State.READY
        assert await ask(engine, request([2])) == answer([2], 5)
        assert await asking == answer([1], 60)


async def test_a_pause_and_an_immediate_resume_leave_the_engine_ready():
    async with serving(FakeExecutor(depth=2)) as engine:
        asking = asyncio.create_task(ask(engine, request([1], 60)))
        await until_steps(engine, 2)
        for mode in ("keep", "wait", "keep"):
            engine.control.pause(mode)
            engine.control.resume()
        assert await asking == answer([1], 60)
        assert engine.lifecycle.state is State.READY


async def test_a_drain_ends_frozen_and_held_requests_at_once():
    async with serving() as engine:
        frozen = asyncio.create_task(ask(engine, request([1], 100)))
        await until_steps(engine, 2)
        await engine.control.pause("keep").result()
        held = asyncio.create_task(ask(engine, request([2])))
        await turns()
        assert await engine.drain(60)
        assert (await frozen)[0][1] is FinishReason.ERROR
        with pytest.raises(NotReady, match="draining"):
            await held
        with pytest.raises(WrongState, match="draining"):
            engine.control.resume()


async def test_a_drain_finishes_the_requests_that_a_waiting_pause_was_finishing():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 40)))
        await until_steps(engine, 2)
        move = engine.control.pause("wait")
        await turns(3)
        assert await engine.drain(60)
        assert await asking == answer([1], 40)
        with pytest.raises(Overtaken, match="draining"):
            await move.result()


async def test_nothing_is_paused_before_the_model_is_loaded():
    engine = Engine(LiveConfig(Config()), FakeExecutor(), Metrics())
    for verb in (engine.control.pause, engine.control.resume):
        with pytest.raises(WrongState, match="starting"):
            verb()
    await engine.close()


async def test_a_lost_device_fails_the_wait_for_a_pause():
    def lost(plan: StepPlan) -> None:
        if plan.number == 5:
            raise DeviceLost("poisoned")

    engine = Engine(LiveConfig(Config(scheduler=SchedulerConfig())), FakeExecutor(fault=lost), Metrics())
    await engine.load()
    running = asyncio.create_task(engine.run())
    await turns()
    asking = asyncio.create_task(ask(engine, request([1], 100)))
    await until_steps(engine, 2)
    move = engine.control.pause("wait")
    with pytest.raises(DeviceLost):
        await running
    with pytest.raises(Overtaken, match="failed"):
        await move.result()
    assert (await asking)[0][1] is FinishReason.ERROR
    await engine.close()


async def test_a_frozen_request_that_leaves_gives_its_pages_back():
    async with serving() as engine:
        async with engine.admit(1, 0) as ticket:
            choices = await ticket.submit(request([1] * 9, 100))
            await anext(choices)
            await engine.control.pause("keep").result()
            assert engine.status().pages_referenced
        assert engine.status().pages_referenced == 0


async def test_an_engine_at_rest_does_nothing():
    async with serving() as engine:
        asking = asyncio.create_task(ask(engine, request([1], 30)))
        await until_steps(engine, 2)
        await engine.control.pause("keep").result()
        plans: list[int] = []
        plan, engine.core.scheduler.plan = engine.core.scheduler.plan, lambda only=None: plans.append(1)
        await turns(50)
        assert (plans, engine.busy) == ([], False)
        engine.core.scheduler.plan = plan
        engine.control.resume()
        await asking


async def test_after_an_abort_new_requests_are_refused_unless_they_are_to_be_held():
    async with serving() as engine:
        await engine.control.pause("abort").result()
        with pytest.raises(NotReady):
            await ask(engine, request([1]))
        await engine.control.pause("abort", "hold").result()
        held = asyncio.create_task(ask(engine, request([1])))
        await turns()
        assert engine.status().held == 1
        engine.control.resume()
        assert await held == answer([1], 5)


async def test_the_wait_for_a_pause_fails_if_the_engine_is_stopped():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        executor.gate.clear()
        asked = asyncio.create_task(ask(engine, request([1] * 3)))
        while not engine.core.loop.in_flight:
            await asyncio.sleep(0)
        pause = engine.control.pause("wait")
        engine.lifecycle.enter(State.DRAINING)
        engine.fail_all(ServerStopped())
        with pytest.raises(Overtaken):
            await pause.result(0)
        executor.gate.set()
        assert (await asked)[0][1] is FinishReason.ERROR
