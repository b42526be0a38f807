"""The order in which the device thread issues, waits and reads, where steps last as long as they are let."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import TYPE_CHECKING

import pytest

from infd.executors.device_thread import DeviceCall, DeviceStep, DeviceThread, MaySample
from infd.runner.pulse import Stopped
from infd.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

MASK = object()


class Paced:
    """A fake runner: an issued step runs until its `end` is set. A step is its plan's number.

    hold    if present for a step, issuing its forward pass waits until it is set
    faults  errors raised by a step's calls, by (verb, number)
    """

    overlaps = True

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.news: SimpleQueue[tuple[object, ...]] = SimpleQueue()
        self.end = {number: Event() for number in range(1, 10)}  # made here: two threads may ask for one at once
        self.hold: dict[int, Event] = {}
        self.faults: dict[tuple[str, int], Exception] = {}
        self.attending: list[str] = []  # threads that were prepared to wait

    def active(self):
        return nullcontext()

    def prepare_to_wait(self):
        self.attending.append(current_thread().name)

    def diagnose(self, error):
        return error

    def forward(self, plan):
        self.say("forward", plan.number)
        if plan.number in self.hold:
            self.hold[plan.number].wait()
        return plan.number

    def sample(self, number, mask):
        self.say("sample", number, *([] if mask is None else ["masked"]))
        return number

    def wait(self, number):
        self.end[number].wait()
        self._fail("wait", number)

    def read(self, number):
        assert not self.overlaps or self.end[number].is_set(), "the device thread would have waited"
        self.say("read", number)
        return number

    def say(self, verb, number, *more):
        self.log.append((verb, number, *more))
        self.news.put((verb, number, *more))
        self._fail(verb, number)

    def _fail(self, verb, number):
        if (verb, number) in self.faults:
            raise self.faults[verb, number]


class Run:
    """A device thread, and the steps issued to it."""

    def __init__(self, runner: Paced) -> None:
        self.runner = runner
        self.answers: dict[int, object] = {}
        self.device = DeviceThread(self._answer)

    def _answer(self, step, outcome):
        self.answers[step.plan.number] = outcome
        self.runner.news.put(("answer", step.plan.number))

    def issue(self, number: int, rollbacks: int = 0) -> DeviceStep:
        step = DeviceStep(StepPlan(number, [], [], []), rollbacks)
        self.device.inbox.put(step)
        return step

    def step(self, number: int) -> None:
        self.go(self.issue(number))

    def go(self, step: DeviceStep, mask: object = None) -> None:
        self.device.inbox.put(MaySample(step, mask))

    def call(self, name: str) -> None:
        self.device.inbox.put(DeviceCall(lambda: self.runner.say("call", name), lambda *_: None))

    def until(self, *news: object) -> None:
        """Return once this has happened."""
        while self.runner.news.get(timeout=60) != news:
            pass


@contextmanager
def running(runner: Paced) -> Iterator[Run]:
    run = Run(runner)

    def serve():
        with pytest.raises(Stopped):
            run.device.serve(runner)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield run
    finally:
        run.device.inbox.put(None)
        for end in (*runner.end.values(), *runner.hold.values()):
            end.set()
        thread.join()


def test_a_plan_that_comes_while_the_device_works_is_issued_before_that_step_ends():
    with running(Paced()) as run:
        for number in (1, 2):
            run.step(number)
            run.until("sample", number)
        run.runner.end[1].set()
        run.until("answer", 1)
        run.step(3)
        run.until("sample", 3)
        assert not run.runner.end[2].is_set()
        assert run.runner.log[-2:] == [("forward", 3), ("sample", 3)]
        for number in (2, 3):
            run.runner.end[number].set()
            run.until("answer", number)
    assert run.answers == {1: 1, 2: 2, 3: 3}


def test_a_step_samples_before_the_previous_step_is_read():
    runner = Paced()
    runner.hold[2] = Event()
    with running(runner) as run:
        run.step(1)
        run.step(2)
        run.until("forward", 2)
        runner.end[1].set()
        runner.hold[2].set()
        run.until("answer", 1)
        runner.end[2].set()
        run.until("answer", 2)
    assert runner.log[2:] == [("forward", 2), ("sample", 2), ("read", 1), ("read", 2)]


def test_a_step_whose_mask_depends_on_the_previous_step_samples_after_that_is_read():
    runner = Paced()
    with running(runner) as run:
        run.step(1)
        masked = run.issue(2)
        run.until("forward", 2)
        runner.end[1].set()
        run.until("answer", 1)
        run.go(masked, MASK)
        run.until("sample", 2, "masked")
        runner.end[2].set()
        run.until("answer", 2)
    assert runner.log[2:] == [("forward", 2), ("read", 1), ("sample", 2, "masked"), ("read", 2)]


def test_no_step_begins_before_the_previous_step_has_sampled():
    runner = Paced()
    with running(runner) as run:
        masked = run.issue(1)
        run.step(2)
        run.until("forward", 1)
        run.go(masked)
        run.until("sample", 2)
        for number in (1, 2):
            runner.end[number].set()
            run.until("answer", number)
    assert runner.log[:4] == [("forward", 1), ("sample", 1), ("forward", 2), ("sample", 2)]


def test_a_call_waits_for_earlier_steps_to_be_read_and_delays_later_steps():
    runner = Paced()
    with running(runner) as run:
        for number in (1, 2):
            run.step(number)
        run.call("between")
        run.step(3)
        run.until("sample", 2)
        for number in (1, 2, 3):
            runner.end[number].set()
            run.until("answer", number)
    assert runner.log[4:] == [("read", 1), ("read", 2), ("call", "between"), *(step(3))]


def step(number: int) -> list[tuple[str, int]]:
    return [(verb, number) for verb in ("forward", "sample", "read")]


def test_an_error_while_waiting_for_a_step_fails_it_and_later_steps_in_flight():
    runner = Paced()
    error = runner.faults["wait", 1] = RuntimeError("an illegal address")
    with running(runner) as run:
        for number in (1, 2):
            run.step(number)
            run.until("sample", number)
        for number in (1, 2):
            runner.end[number].set()
            run.until("answer", number)
        run.go(run.issue(3, rollbacks=1))
        runner.end[3].set()
        run.until("answer", 3)
    assert run.answers == {1: error, 2: error, 3: 3}
    assert ("read", 2) not in runner.log


@pytest.mark.parametrize("verb", ["forward", "sample"])
def test_a_step_that_cannot_be_issued_is_not_the_fault_of_the_one_that_the_device_works_on(verb):
    runner = Paced()
    error = runner.faults[verb, 2] = RuntimeError("no")
    with running(runner) as run:
        for number in (1, 2, 3):
            run.step(number)
        run.until("answer", 3)
        runner.end[1].set()
        run.until("answer", 1)
    assert run.answers == {1: 1, 2: error, 3: error}


def test_close_waits_for_the_running_step_without_reading_it():
    runner = Paced()
    with running(runner) as run:
        run.step(1)
        run.until("sample", 1)
        run.device.inbox.put(None)
        runner.end[1].set()
    assert run.answers == {}


def test_the_waiting_thread_is_set_up_once():
    runner = Paced()
    with running(runner) as run:
        for number in (1, 2):
            runner.end[number].set()
            run.step(number)
            run.until("answer", number)
    assert runner.attending == ["infd-waiter"]


def test_with_shared_memory_a_step_is_read_at_once_without_waiting():
    runner = Paced()
    runner.overlaps = False
    runner.faults = {("wait", number): AssertionError("there is nothing to wait for") for number in (1, 2)}
    with running(runner) as run:
        for number in (1, 2):
            run.step(number)
            run.until("answer", number)
    assert runner.log == [*step(1), *step(2)]
