"""An engine's events, in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from infd.engine.lifecycle.state import State
from infd.errors import CheckpointError
from infd.request import FinishReason
from tests.engine.driving import ask, request, serving
from tests.fakes import FakeExecutor, Seated

if TYPE_CHECKING:
    from infd.engine.engine import Engine
    from infd.scheduler.plan import StepPlan

POISON = 97


async def told(engine: Engine, kind: str) -> list[str]:
    return [event.message async for event, _ in engine.events.read() if event.kind == kind]


async def test_every_change_of_state_is_one_event():
    async with serving() as engine:
        await engine.control.sleep(level=2).result()
        engine.lifecycle.enter(State.SLEEPING, engine.lifecycle.reason)
        await engine.control.wake().result()
        assert await told(engine, "state") == ["ready", "paused", "sleeping", "sleeping", "ready"]
        assert await told(engine, "rest") == ["sleeping", "ready"]


async def test_a_transition_that_fails_is_an_event_with_its_reason():
    executor = FakeExecutor()
    executor.wake_error = executor.weights_error = CheckpointError("/model: gone")
    async with serving(executor) as engine:
        await engine.control.sleep().result()
        for verb in (engine.control.wake, lambda: engine.control.load_weights("/other")):
            with pytest.raises(CheckpointError):
                await verb().result()
        failures = [event async for event, _ in engine.events.read() if "error" in event.facts]
        assert [(event.kind, event.message) for event in failures] == [("rest", "not ready"), ("weights", "not loaded")]
        assert {event.facts["error"] for event in failures} == {"/model: gone"}


async def test_a_failed_step_is_an_event_that_names_its_request():
    seated = Seated()

    def fault(plan: StepPlan) -> None:
        if any(POISON in tokens for tokens in seated.of(plan)):
            raise RuntimeError("the kernel said no")

    async with serving(FakeExecutor(fault=fault)) as engine:
        answers = await asyncio.gather(*(ask(engine, request(prompt)) for prompt in ([1], [POISON], [2])))
        assert [answer[0][1] is FinishReason.ERROR for answer in answers] == [False, True, False]
        steps = [event async for event, _ in engine.events.read() if event.kind == "step"]
        assert {event.message for event in steps} == {"failed"}
        assert "the kernel said no" in str(steps[0].facts["error"])
        assert steps[0].facts["sequences"] == 3
        assert await told(engine, "request") == ["failed"]
