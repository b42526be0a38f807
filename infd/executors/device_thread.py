"""The device thread: the only place where torch runs.

Steps start strictly in order: forward, permission to sample, sample. On a GPU both halves only launch work. The waiter
(`waiter.py`) reports when the GPU has finished a step; then its result is read. A plan that arrives in between is
launched at once, so that the GPU goes from one step to the next. A step with permission samples before the previous
step is read.

A failed step fails every later step of its line: the steps issued before the event loop received the failure. Their
plans rely on tokens and pages that the failed step never produced, so they must not run.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

from infd.executors.waiter import Waiter
from infd.runner.pulse import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from infd.runner.runner import Forwarded, Landing, Runner
    from infd.scheduler.plan import StepPlan, StepResult

    Mask = npt.NDArray[Any]


IDLE_S = 0.05  # wait without work before idle work starts


class Order:
    """A step, as issued to the device thread.

    line        incremented by the event loop at each failure, see above
    number      sequence number, in the order in which the device thread received the steps
    may_sample  whether permission to sample, with the mask, has arrived
    """

    __slots__ = ("line", "mask", "may_sample", "number", "plan")

    def __init__(self, plan: StepPlan, line: int) -> None:
        self.plan = plan
        self.line = line
        self.number = 0
        self.may_sample = False
        self.mask: Mask | None = None


class MaySample:
    """Permission for an order to sample."""

    __slots__ = ("mask", "order")

    def __init__(self, order: Order, mask: Mask | None) -> None:
        self.order = order
        self.mask = mask


class Errand:
    """Other work for the device thread, done after the steps issued so far and before any later step."""

    __slots__ = ("_done", "_work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        """Both run on the device thread: `work`, then `done` with its result and None, or None and its exception."""
        self._work = work
        self._done = done

    def run(self) -> None:
        try:
            outcome = self._work()
        except Exception as error:  # the errand's future raises it
            self._done(None, error)
        else:
            self._done(outcome, None)


class Issued:
    """A step whose two halves are launched.

    landed  whether the device has finished the step
    error   raised while the waiter waited for the step
    """

    __slots__ = ("error", "landed", "landing", "order")

    def __init__(self, order: Order, landing: Landing, *, landed: bool) -> None:
        self.order = order
        self.landing = landing
        self.landed = landed
        self.error: Exception | None = None


class Landed:
    """The waiter's report that the device has finished a step."""

    __slots__ = ("error", "issued")

    def __init__(self, issued: Issued, error: Exception | None) -> None:
        self.issued = issued
        self.error = error


class DeviceThread:
    """The loop of the device thread.

    inbox   receives orders, permissions to sample, errands, and None to end
    answer  called on the device thread with each order and its result or exception
    """

    def __init__(self, answer: Callable[[Order, StepResult | Exception], None]) -> None:
        self.inbox: SimpleQueue[Order | MaySample | Errand | Landed | None] = SimpleQueue()
        self._answer = answer
        self._backlog: deque[Order | Errand] = deque()
        self._begun: tuple[Order, Forwarded] | None = None  # the step with a launched forward pass, not yet sampled
        self._unread: deque[Issued] = deque()
        self._taken = 0
        self._failed: Order | None = None
        self._failure: Exception | None = None

    def serve(self, runner: Runner, idle: Callable[[], bool] = lambda: False, quiet: Event | None = None) -> None:
        """Run orders until `inbox` receives None or a beat raises Stopped. Raises Stopped.

        idle   does a short piece of idle work; returns whether more may be pending
        quiet  set while no step is in flight
        """
        quiet = quiet or Event()

        def wait(issued: Issued) -> None:
            runner.wait(issued.landing)

        def report(issued: Issued, error: Exception | None) -> None:
            self.inbox.put(Landed(issued, error))

        with runner.active(), Waiter(wait, report, runner.attend) as waiter:
            while True:
                if self._begun is None and not self._unread:
                    self._rest(idle, quiet)
                done = self._do_next(runner, waiter)
                self._receive(wait=not done)
                quiet.clear()

    def _do_next(self, runner: Runner, waiter: Waiter[Issued]) -> bool:
        """Do the next possible piece of work: sample, read, forward or run an errand; False if none is possible."""
        if self._begun is not None and self._begun[0].may_sample:
            self._sample(runner, waiter, *self._begun)
        elif self._unread and self._unread[0].landed:
            self._read(runner, self._unread.popleft())
        elif self._begun is not None or not self._backlog:
            return False
        elif isinstance(first := self._backlog[0], Order):
            self._backlog.popleft()
            self._forward(runner, first)
        elif not self._unread:
            self._backlog.popleft()
            first.run()
        else:
            return False
        return True

    def _rest(self, idle: Callable[[], bool], quiet: Event) -> None:
        """Wait IDLE_S for a message; if none arrives, do idle work until a message arrives."""
        if self._backlog:
            return
        try:
            self._take(self.inbox.get(timeout=IDLE_S))
        except Empty:
            quiet.set()
            while self.inbox.empty() and idle():
                pass

    def _forward(self, runner: Runner, order: Order) -> None:
        with self._guarded(runner, order) as may_run:
            if may_run:
                self._begun = order, runner.forward(order.plan)

    def _sample(self, runner: Runner, waiter: Waiter[Issued], order: Order, forwarded: Forwarded) -> None:
        self._begun = None
        with self._guarded(runner, order) as may_run:
            if may_run:
                issued = Issued(order, runner.sample(forwarded, order.mask), landed=not runner.overlaps)
                self._unread.append(issued)
                if not issued.landed:
                    waiter.add(issued)

    def _read(self, runner: Runner, issued: Issued) -> None:
        with self._guarded(runner, issued.order) as may_run:
            if may_run:
                if issued.error is not None:
                    raise issued.error
                self._answer(issued.order, runner.read(issued.landing))

    @contextmanager
    def _guarded(self, runner: Runner, order: Order) -> Iterator[bool]:
        """Yield whether no earlier step of the order's line has failed. An exception fails the order and its line."""
        failed = self._failed
        # With overlap, a step is read after the next step was launched: the later step's failure does not concern it.
        if failed is not None and order.line == failed.line and order.number > failed.number:
            assert self._failure is not None
            self._answer(order, self._failure)
            yield False
            return
        try:
            yield True
        except Exception as error:  # the step's future raises it
            self._failed, self._failure = order, runner.diagnose(error)
            self._answer(order, self._failure)

    def _receive(self, *, wait: bool) -> None:
        """Handle all messages that have arrived; if `wait`, wait for the first."""
        while wait or not self.inbox.empty():
            self._take(self.inbox.get())
            wait = False

    def _take(self, message: Order | MaySample | Errand | Landed | None) -> None:
        if message is None:
            raise Stopped
        if isinstance(message, MaySample):
            message.order.may_sample, message.order.mask = True, message.mask
        elif isinstance(message, Landed):
            message.issued.landed, message.issued.error = True, message.error
        else:
            if isinstance(message, Order):
                self._taken += 1
                message.number = self._taken
            self._backlog.append(message)
