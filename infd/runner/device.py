"""The device thread: the only place where torch runs.

Steps are taken strictly in order: forward, wait for the word to sample, sample,
answer. On a GPU the next step's forward is issued before an answer is waited
for, if its plan is there already.

A step that fails takes with it every step of its line: those issued before
the loop heard of the failure. Their plans stand on tokens and pages that never
came to be, so they must not run.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from infd.runner.pulse import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from infd.runner.runner import Forwarded, Landing, Runner
    from infd.scheduler.plan import StepPlan, StepResult

    Mask = npt.NDArray[Any]


IDLE_S = 0.05  # without work, and there is time for other things


class Order:
    """A step as the device thread sees it: the plan, its line, and, once told, the mask to sample under."""

    __slots__ = ("line", "mask", "number", "plan", "told")

    def __init__(self, plan: StepPlan, line: int) -> None:
        self.plan = plan
        self.line = line
        self.number = 0  # in the order in which the device took them
        self.told = False
        self.mask: Mask | None = None


class Go:
    """The word that an order may sample."""

    __slots__ = ("mask", "order")

    def __init__(self, order: Order, mask: Mask | None) -> None:
        self.order = order
        self.mask = mask


class Errand:
    """Other work for the device thread, done between the steps before it and those behind it."""

    __slots__ = ("_done", "_work")

    def __init__(self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        """Both are called on the device thread; `done` with what `work` returned, or with what it raised."""
        self._work = work
        self._done = done

    def run(self) -> None:
        try:
            outcome = self._work()
        except Exception as error:  # it belongs to whoever sent the errand
            self._done(None, error)
        else:
            self._done(outcome, None)


class Device:
    """What runs on the device thread. `inbox` takes orders, words to sample, errands, and None to end.

    answer  called with each order and what came of it, on the device thread
    """

    def __init__(self, answer: Callable[[Order, StepResult | Exception], None]) -> None:
        self.inbox: SimpleQueue[Order | Go | Errand | None] = SimpleQueue()
        self._answer = answer
        self._backlog: deque[Order | Errand] = deque()
        self._taken = 0
        self._failed: Order | None = None
        self._failure: Exception | None = None

    def serve(
        self, runner: Runner, settle: Callable[[], bool] = lambda: False, idle: Callable[[], bool] = lambda: False
    ) -> None:
        """Take orders until Stopped is raised.

        settle  does a few milliseconds of work that can wait; returns whether there may be more
        idle    the same, of what takes so long that it waits until nothing else is to do
        """
        unread: tuple[Order, Landing] | None = None
        with runner.active():
            while True:
                if unread is None:
                    self._settle(settle, idle)
                order = self._next(wait=unread is None)
                forwarded = self._forward(runner, order) if isinstance(order, Order) else None
                if unread is not None:
                    self._read(runner, *unread)
                    unread = None
                if isinstance(order, Errand):
                    order.run()
                    continue
                if order is None or forwarded is None:
                    continue
                landing = self._sample(runner, order, forwarded)
                if landing is None:
                    continue
                if runner.overlaps:
                    unread = order, landing
                else:
                    self._read(runner, order, landing)

    def _settle(self, settle: Callable[[], bool], idle: Callable[[], bool]) -> None:
        """Settle while there is nothing to do; where there always is something, a little before each of it."""
        try:
            if not self._backlog:
                self._receive(self.inbox.get(timeout=IDLE_S))
        except Empty:
            while self.inbox.empty() and (settle() or idle()):
                pass
        else:
            settle()

    def _forward(self, runner: Runner, order: Order) -> Forwarded | None:
        with self._guarded(runner, order) as may_run:
            if may_run:
                return runner.forward(order.plan)
        return None

    def _sample(self, runner: Runner, order: Order, forwarded: Forwarded) -> Landing | None:
        while not order.told:
            self._receive(self.inbox.get())
        with self._guarded(runner, order) as may_run:
            if may_run:
                return runner.sample(forwarded, order.mask)
        return None

    def _read(self, runner: Runner, order: Order, landing: Landing) -> None:
        with self._guarded(runner, order) as may_run:
            if may_run:
                self._answer(order, runner.read(landing))

    @contextmanager
    def _guarded(self, runner: Runner, order: Order) -> Iterator[bool]:
        """Yield whether the order's line still stands. What is raised in here fails the order, and its line with it."""
        failed = self._failed
        # With overlap, a step is read after the one behind it was issued, and may have failed: that is not its fault.
        if failed is not None and order.line == failed.line and order.number > failed.number:
            assert self._failure is not None
            self._answer(order, self._failure)
            yield False
            return
        try:
            yield True
        except Exception as error:  # whatever a step raises belongs to those who wait for it
            self._failed, self._failure = order, runner.diagnose(error)
            self._answer(order, self._failure)

    def _next(self, *, wait: bool) -> Order | Errand | None:
        """Return the oldest order or errand not yet begun; without waiting, None if there is none."""
        try:
            while not self._backlog:
                self._receive(self.inbox.get(block=wait))
        except Empty:
            return None
        return self._backlog.popleft()

    def _receive(self, message: Order | Go | Errand | None) -> None:
        if message is None:
            raise Stopped
        if isinstance(message, Go):
            message.order.told, message.order.mask = True, message.mask
            return
        if isinstance(message, Order):
            self._taken += 1
            message.number = self._taken
        self._backlog.append(message)
