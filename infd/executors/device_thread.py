"""The device thread, the only thread that computes steps.

A step has two halves, forward and sample; `sample` waits for permission from the event loop. Steps start strictly in
order. On a GPU both halves only launch work. The waiter (`waiter.py`) reports when the GPU has finished a step; then
the device thread reads the step's result. Until that report arrives, the device thread launches the next step, and
samples it if permitted, so that the GPU is not idle between steps.

When a step fails, all later steps fail that were issued before the event loop rolled the failed step back: their plans
rely on tokens and pages that the failed step did not produce.
"""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

from infd.executors.waiter import Waiter
from infd.runner.pulse import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from infd.runner.runner import Forwarded, PendingResult, Runner
    from infd.scheduler.plan import StepPlan, StepResult

    Mask = npt.NDArray[Any]


IDLE_S = 0.05  # seconds without a message before idle work starts


class DeviceStep:
    """A step, as issued to the device thread.

    rollbacks   number of rollbacks before the step was planned
    number      sequence number, in the order in which the device thread received the steps
    may_sample  whether permission to sample, with the mask, has arrived
    """

    __slots__ = ("mask", "may_sample", "number", "plan", "rollbacks")

    def __init__(self, plan: StepPlan, rollbacks: int) -> None:
        self.plan = plan
        self.rollbacks = rollbacks
        self.number = 0
        self.may_sample = False
        self.mask: Mask | None = None


class MaySample:
    """Permission for a step to sample."""

    __slots__ = ("mask", "step")

    def __init__(self, step: DeviceStep, mask: Mask | None) -> None:
        self.step = step
        self.mask = mask


class DeviceCall:
    """A function to call on the device thread, after the steps issued so far and before any later step."""

    __slots__ = ("_done", "_work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        """Set up a call.

        work  called on the device thread
        done  called on the device thread with (result of `work`, None) or (None, exception of `work`)
        """
        self._work = work
        self._done = done

    def run(self) -> None:
        try:
            outcome = self._work()
        except Exception as error:  # the call's future raises the error
            self._done(None, error)
        else:
            self._done(outcome, None)


class LaunchedStep:
    """A step whose two halves are launched.

    finished  whether the device has finished the step
    error     exception that was raised while the waiter waited for the step
    """

    __slots__ = ("error", "finished", "pending", "step")

    def __init__(self, step: DeviceStep, pending: PendingResult, *, finished: bool) -> None:
        self.step = step
        self.pending = pending
        self.finished = finished
        self.error: Exception | None = None


class StepFinished:
    """The waiter's report that the device has finished a step."""

    __slots__ = ("error", "launched")

    def __init__(self, launched: LaunchedStep, error: Exception | None) -> None:
        self.launched = launched
        self.error = error


class DeviceThread:
    """The loop of the device thread.

    inbox   receives steps, permissions to sample, calls, and None to end
    answer  called on the device thread with each step and its result or exception
    """

    def __init__(self, answer: Callable[[DeviceStep, StepResult | Exception], None]) -> None:
        self.inbox: SimpleQueue[DeviceStep | MaySample | DeviceCall | StepFinished | None] = SimpleQueue()
        self._answer = answer
        self._backlog: deque[DeviceStep | DeviceCall] = deque()
        self._begun: tuple[DeviceStep, Forwarded] | None = None  # the step that is launched but not yet sampled
        self._unread: deque[LaunchedStep] = deque()
        self._received = 0  # number of steps received
        self._failed: DeviceStep | None = None
        self._failure: Exception | None = None

    def serve(self, runner: Runner, idle: Callable[[], bool] = lambda: False, quiet: Event | None = None) -> None:
        """Run steps until `inbox` receives None or `Pulse.beat` raises Stopped. Raises Stopped.

        idle   does a short piece of idle work; returns whether more work may be pending
        quiet  set once no message has arrived for IDLE_S while no step was in flight; cleared at the next message
        """
        quiet = quiet or Event()

        def wait(launched: LaunchedStep) -> None:
            runner.wait(launched.pending)

        def report(launched: LaunchedStep, error: Exception | None) -> None:
            self.inbox.put(StepFinished(launched, error))

        with runner.active(), Waiter(wait, report, runner.prepare_to_wait) as waiter:
            while True:
                if self._begun is None and not self._unread:
                    self._rest(idle, quiet)
                done = self._do_next(runner, waiter)
                self._receive(wait=not done)

    def _do_next(self, runner: Runner, waiter: Waiter[LaunchedStep]) -> bool:
        """Do the first of these that is possible: sample, read, forward, make a call. Return False if none is."""
        if self._begun is not None and self._begun[0].may_sample:
            self._sample(runner, waiter, *self._begun)
        elif self._unread and self._unread[0].finished:
            self._read(runner, self._unread.popleft())
        elif self._begun is not None or not self._backlog:
            return False
        elif isinstance(first := self._backlog[0], DeviceStep):
            self._backlog.popleft()
            self._forward(runner, first)
        elif not self._unread:
            self._backlog.popleft()
            first.run()
        else:
            return False
        return True

    def _rest(self, idle: Callable[[], bool], quiet: Event) -> None:
        """Wait for a message. If none arrives for IDLE_S, do idle work until a message arrives."""
        if self._backlog:
            return
        try:
            message = self.inbox.get(timeout=IDLE_S)
        except Empty:
            quiet.set()
            while self.inbox.empty() and idle():
                pass
            message = self.inbox.get()
            quiet.clear()
        self._take(message)

    def _forward(self, runner: Runner, step: DeviceStep) -> None:
        if self._refuses(step):
            return
        try:
            self._begun = step, runner.forward(step.plan)
        except Exception as error:  # the step's future raises the error
            self._fail(runner, step, error)

    def _sample(self, runner: Runner, waiter: Waiter[LaunchedStep], step: DeviceStep, forwarded: Forwarded) -> None:
        self._begun = None
        if self._refuses(step):
            return
        try:
            launched = LaunchedStep(step, runner.sample(forwarded, step.mask), finished=not runner.overlaps)
            self._unread.append(launched)
            if not launched.finished:
                waiter.add(launched)
        except Exception as error:  # the step's future raises the error
            self._fail(runner, step, error)

    def _read(self, runner: Runner, launched: LaunchedStep) -> None:
        step = launched.step
        if self._refuses(step):
            return
        try:
            if launched.error is not None:
                raise launched.error
            self._answer(step, runner.read(launched.pending))
        except Exception as error:  # the step's future raises the error
            self._fail(runner, step, error)

    def _refuses(self, step: DeviceStep) -> bool:
        """Answer a step with an earlier step's failure, if that was not rolled back before the plan; return whether."""
        failed = self._failed
        # With overlap, a step may fail before the previous step is read; the previous step must not fail then.
        if failed is None or step.rollbacks != failed.rollbacks or step.number <= failed.number:
            return False
        assert self._failure is not None
        self._answer(step, self._failure)
        return True

    def _fail(self, runner: Runner, step: DeviceStep, error: Exception) -> None:
        """Answer a step with its error, and fail all later steps that were planned before the rollback."""
        self._failed, self._failure = step, runner.diagnose(error)
        self._answer(step, self._failure)

    def _receive(self, *, wait: bool) -> None:
        """Handle all messages that have arrived; if `wait`, wait for the first."""
        while wait or not self.inbox.empty():
            self._take(self.inbox.get())
            wait = False

    def _take(self, message: DeviceStep | MaySample | DeviceCall | StepFinished | None) -> None:
        if message is None:
            raise Stopped
        if isinstance(message, MaySample):
            message.step.may_sample, message.step.mask = True, message.mask
        elif isinstance(message, StepFinished):
            message.launched.finished, message.launched.error = True, message.error
        else:
            if isinstance(message, DeviceStep):
                self._received += 1
                message.number = self._received
            self._backlog.append(message)
