"""A short step that is alone is computed by the thread of the event loop; every other step by the device thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from infd.errors import DeviceLost
from infd.executors import local, short_steps
from infd.executors.device_thread import DeviceThread
from infd.executors.short_steps import ShortSteps
from infd.memory import ALL
from infd.request import Adapter, Pool
from infd.runner.adapters import DeviceSlots
from infd.runner.runner import Runner
from infd.scheduler.plan import Join, Load, Span, StepPlan
from tests.executors.pooling import executor
from tests.models.encoding import make, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from infd.executors.local import LocalExecutor
    from infd.scheduler.plan import StepResult

DEVICE = "infd-device"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True)
def all_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not depend on the machine's speed."""
    monkeypatch.setattr(short_steps, "SHORT_S", 60.0)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that computed steps."""
    names: list[str] = []
    forward = Runner.forward

    def noted(self: Runner, plan: StepPlan):
        names.append(threading.current_thread().name)
        return forward(self, plan)

    monkeypatch.setattr(Runner, "forward", noted)
    return names


@pytest.fixture
async def runs(bert: Path, threads: list[str]) -> AsyncIterator[LocalExecutor]:
    runs = executor(bert, mode="mean")
    await runs.load()
    threads.clear()
    try:
        yield runs
    finally:
        await runs.close()


def plan(tokens: list[int], row: int = 0, *, loads: tuple[Load, ...] = ()) -> StepPlan:
    """Return a step that pools a text."""
    join = Join(row, tokens, len(tokens), (Pool("embed"),), [], seed=0)
    return StepPlan(0, [join], [], [Span(row, 0, len(tokens), samples=0, pools=len(tokens))], list(loads))


def numbers(result: StepResult) -> np.ndarray:
    return np.frombuffer(result.pooled[0].values, "<f4")


async def waiting(runs: LocalExecutor, threads: list[str]) -> None:
    """Return once the device thread waits for messages, so that lone steps are computed here."""
    for _ in range(1000):
        step = runs.forward(plan([5]), alone=True).sample()
        if step.done():
            threads.clear()
            return
        await step
    pytest.fail("the device thread computes all steps")


async def test_a_lone_short_step_has_its_result_at_once_and_the_numbers_of_the_device_thread(
    runs: LocalExecutor, threads: list[str]
):
    await waiting(runs, threads)
    lone = runs.forward(plan(text(1, 20)), alone=True).sample()
    assert lone.done()
    other = await runs.forward(plan(text(1, 20))).sample()
    assert threads == [threading.current_thread().name, DEVICE]
    assert (numbers(lone.result()) == numbers(other)).all()


async def test_a_step_is_computed_on_the_device_thread_unless_it_is_short(
    runs: LocalExecutor, threads: list[str], monkeypatch: pytest.MonkeyPatch
):
    await waiting(runs, threads)
    monkeypatch.setattr(short_steps, "SHORT_S", 0.0)
    assert len(numbers(await runs.forward(plan(text(1, 20)), alone=True).sample()))
    assert threads == [DEVICE]


async def test_a_lone_step_waits_for_work_that_the_device_thread_was_given_before(
    runs: LocalExecutor, threads: list[str], monkeypatch: pytest.MonkeyPatch
):
    await waiting(runs, threads)
    work = threading.Event()
    # The device thread may have taken the message, and not yet the runner.
    monkeypatch.setattr(DeviceThread, "compute", lambda *_: pytest.fail("the step would be computed before the call"))
    before = runs.between(lambda _: work.wait())
    step = runs.forward(plan(text(1, 20)), alone=True).sample()
    assert not step.done()
    work.set()
    await step
    assert before.done()
    assert threads == [DEVICE]


async def test_a_lone_step_that_fails_fails_its_future_and_the_next_one_runs(
    runs: LocalExecutor, threads: list[str], monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise RuntimeError("the kernel said no")

    await waiting(runs, threads)
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "forward", broken)
        failed = runs.forward(plan(text(1, 20)), alone=True).sample()
        assert failed.done()
        with pytest.raises(RuntimeError, match="said no"):
            await failed
    assert runs.forward(plan(text(1, 20)), alone=True).sample().done()
    assert len(numbers(await runs.forward(plan(text(1, 20))).sample()))


async def test_a_lone_step_fails_while_memory_is_released_and_after_the_end(runs: LocalExecutor, threads: list[str]):
    await runs.sleep(1)
    with pytest.raises(RuntimeError, match="memory is released"):
        await runs.forward(plan(text(1, 20)), alone=True).sample()
    await runs.wake(ALL)
    await waiting(runs, threads)
    assert runs.forward(plan(text(1, 20)), alone=True).sample().done()
    await runs.close()
    with pytest.raises(DeviceLost):
        await runs.forward(plan(text(1, 20)), alone=True).sample()


async def test_steps_that_prove_short_come_to_the_event_loop(
    bert: Path, threads: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "ShortSteps", lambda _: ShortSteps(100.0))  # as measured by a start under load
    runs = executor(bert, mode="mean")
    await runs.load()
    try:
        threads.clear()
        await runs.forward(plan(text(1, 20)), alone=True).sample()
        assert threads == [DEVICE]
        await waiting(runs, threads)
    finally:
        await runs.close()


async def test_a_step_that_fills_an_adapters_slot_is_computed_on_the_device_thread(
    runs: LocalExecutor, threads: list[str], monkeypatch: pytest.MonkeyPatch
):
    await waiting(runs, threads)
    monkeypatch.setattr(DeviceSlots, "fill", lambda *_: None)
    await runs.forward(plan(text(1, 20), loads=(Load(1, Adapter("a", 1)),)), alone=True).sample()
    assert threads == [DEVICE]


def test_steps_are_foreseen_from_those_before_so_that_a_slower_machine_has_fewer_short_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(short_steps, "SHORT_S", 0.005)
    short = ShortSteps(1e-4)
    assert short.include(50)
    assert not short.include(51)
    for _ in range(50):
        short.took(20, 0.02)
    assert not short.include(6)  # fewer than 16 tokens take as long as 16
    for _ in range(50):
        short.took(20, 0.002)
    assert short.include(49)
