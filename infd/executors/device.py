"""The device thread: the only place where torch runs.

Steps are begun strictly in order: forward, the word to sample, sample. A GPU is only given them. What came of a step is
read when the GPU is past it, which is waited for elsewhere (`waiter.py`): a plan that arrives meanwhile is issued at
once, so that the GPU goes from one step to the next. A step samples before the one before it is read, where it may.

A step that fails takes with it every step of its line: those issued before
the loop heard of the failure. Their plans stand on tokens and pages that never
came to be, so they must not run.
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


class Issued:
    """A step of which all is issued, and what was raised when it was waited for."""

    __slots__ = ("error", "landed", "landing", "order")

    def __init__(self, order: Order, landing: Landing, *, landed: bool) -> None:
        self.order = order
        self.landing = landing
        self.landed = landed
        self.error: Exception | None = None


class Landed:
    """The news that the device is past a step."""

    __slots__ = ("error", "issued")

    def __init__(self, issued: Issued, error: Exception | None) -> None:
        self.issued = issued
        self.error = error


class Device:
    """What runs on the device thread. `inbox` takes orders, words to sample, errands, and None to end.

    answer  called with each order and what came of it, on the device thread
    """

    def __init__(self, answer: Callable[[Order, StepResult | Exception], None]) -> None:
        self.inbox: SimpleQueue[Order | Go | Errand | Landed | None] = SimpleQueue()
        self._answer = answer
        self._backlog: deque[Order | Errand] = deque()
        self._begun: tuple[Order, Forwarded] | None = None  # it has yet to sample
        self._unread: deque[Issued] = deque()
        self._taken = 0
        self._failed: Order | None = None
        self._failure: Exception | None = None

    def serve(self, runner: Runner, idle: Callable[[], bool] = lambda: False, quiet: Event | None = None) -> None:
        """Take orders until Stopped is raised.

        idle   does a little work that can wait until nothing else is to do; returns whether there may be more
        quiet  is set while that is so
        """
        quiet = quiet or Event()

        def wait(issued: Issued) -> None:
            runner.wait(issued.landing)

        def tell(issued: Issued, error: Exception | None) -> None:
            self.inbox.put(Landed(issued, error))

        with runner.active(), Waiter(wait, tell, runner.attend) as waiter:
            while True:
                if self._begun is None and not self._unread:
                    self._rest(idle, quiet)
                done = self._do_next(runner, waiter)
                self._receive(wait=not done)
                quiet.clear()

    def _do_next(self, runner: Runner, waiter: Waiter[Issued]) -> bool:
        """Do what is to be done first of what can be done now; return whether there was anything."""
        if self._begun is not None and self._begun[0].told:
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
        """Give work a moment to arrive; if there is none, do what waits for that."""
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
                    waiter.take(issued)

    def _read(self, runner: Runner, issued: Issued) -> None:
        with self._guarded(runner, issued.order) as may_run:
            if may_run:
                if issued.error is not None:
                    raise issued.error
                self._answer(issued.order, runner.read(issued.landing))

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

    def _receive(self, *, wait: bool) -> None:
        """Take in what has arrived, and wait for something to arrive if told so."""
        while wait or not self.inbox.empty():
            self._take(self.inbox.get())
            wait = False

    def _take(self, message: Order | Go | Errand | Landed | None) -> None:
        if message is None:
            raise Stopped
        if isinstance(message, Go):
            message.order.told, message.order.mask = True, message.mask
        elif isinstance(message, Landed):
            message.issued.landed, message.issued.error = True, message.error
        else:
            if isinstance(message, Order):
                self._taken += 1
                message.number = self._taken
            self._backlog.append(message)
