"""Keep the device busy.

On a result: commit, plan the next step, issue it, and only then deliver the
tokens, so that the device never waits for readers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.engine.steps.suspects import Suspects
from infd.errors import DeviceLost, StepTooLarge, without_frames
from infd.request import FinishReason
from infd.scheduler.scheduler import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.engine.executor import Executor
    from infd.scheduler.plan import StepResult
    from infd.scheduler.scheduler import Scheduled, Scheduler
    from infd.telemetry.events import Events

log = logging.getLogger("infd.engine")


class Issued(Struct):
    """A step in flight."""

    step: Scheduled
    result: asyncio.Future[StepResult]
    at: float  # monotonic seconds


class StepLoop:
    """Plans and commits steps, `executor.depth` of them in flight.

    on_plan    called with each step when it is issued
    on_commit  called with each committed step and its outcomes, after the next step is issued
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        events: Events,
        clock: Callable[[], float],
        on_plan: Callable[[Issued], None],
        on_commit: Callable[[Issued, list[Outcome]], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._events = events
        self._clock = clock
        self._on_plan = on_plan
        self._on_commit = on_commit
        self._in_flight: deque[Issued] = deque()
        self._committed: deque[tuple[Issued, list[Outcome]]] = deque()  # on_commit not yet called
        self._suspects = Suspects()
        self._news = asyncio.Event()
        self._held = False
        self._still = asyncio.Event()
        self._failure: DeviceLost | None = None

    def fail(self, error: DeviceLost) -> None:
        """Make `run` raise `error`, even if no step is in flight."""
        self._failure = error
        self.wake()

    def wake(self) -> None:
        """Plan again: a sequence may have become plannable."""
        self._news.set()

    def hold(self) -> None:
        """Issue no more steps until `go`."""
        if not self._held:
            self._held = True
            self._still.clear()
            self.wake()

    def go(self) -> None:
        """Issue steps again."""
        self._held = False
        self.wake()

    @property
    def held(self) -> bool:
        return self._held

    async def settled(self) -> None:
        """Return once the loop is held and no step is in flight."""
        await self._still.wait()

    @property
    def in_flight(self) -> int:
        """Steps issued and not yet committed."""
        return len(self._in_flight)

    async def run(self) -> None:
        """Run until cancelled. Raises DeviceLost."""
        try:
            while True:
                self._news.clear()
                self._issue()
                self._deliver()
                if self._held and not self._in_flight:
                    self._still.set()
                await self._news.wait()
                if self._failure is not None:
                    raise self._failure
                while self._in_flight and self._in_flight[0].result.done():
                    await self._commit(self._in_flight.popleft())
        finally:
            self._deliver()  # committed tokens reach their readers even if a step or the device failed

    async def _commit(self, issued: Issued) -> None:
        """Commit a step, or undo it if it failed. Raises DeviceLost."""
        error = issued.result.exception()
        if error is None:
            outcomes = self._scheduler.commit(issued.step, issued.result.result())
        elif isinstance(error, DeviceLost):
            raise error
        else:
            outcomes = await self._recover(issued, error)
        self._committed.append((issued, outcomes))

    def _deliver(self) -> None:
        while self._committed:
            self._on_commit(*self._committed.popleft())

    def _issue(self) -> None:
        """Issue steps until `executor.depth` are in flight; one at a time while sequences are suspected."""
        while not self._held and len(self._in_flight) < self._executor.depth:
            suspects = self._suspects.on_trial
            if suspects is not None and self._in_flight:
                return
            step = self._scheduler.plan(suspects)
            if step is None and suspects is not None:
                self._suspects.dismiss()  # the suspects wait for a sequence outside their group
                continue
            if step is None:
                return
            result = self._executor.forward(step.plan).sample()
            result.add_done_callback(lambda _: self._news.set())
            issued = Issued(step, result, self._clock())
            self._in_flight.append(issued)
            self._on_plan(issued)

    async def _recover(self, failed: Issued, error: BaseException) -> list[Outcome]:
        """Undo the failed step and the steps in flight behind it; fail the sequence at fault once it is found."""
        number, sequences = failed.step.plan.number, len(failed.step.sequences)
        log.error("step %d of %d sequences failed", number, sequences, exc_info=error)
        without_frames(error)
        self._events.tell("step", "failed", number=number, sequences=sequences, error=repr(error))
        behind = list(self._in_flight)
        await asyncio.gather(*(issued.result for issued in behind), return_exceptions=True)
        self._in_flight.clear()
        self._scheduler.rollback([failed.step, *(issued.step for issued in behind)])
        self._scheduler.verify()
        if isinstance(error, StepTooLarge) and self._scheduler.shrink(failed.step):
            return []
        culprit = self._suspects.accuse(failed.step)
        if culprit is None:
            return []
        self._scheduler.remove(culprit, FinishReason.ERROR, error)
        return [Outcome(culprit, [], [], FinishReason.ERROR)]
