"""Keep the device busy.

On a result: commit, plan the next step, issue it, and only then hand results
to their readers, so that the device never waits for them.
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

    on_plan    told of each step as it is issued
    on_commit  told of each step as it is committed, with what it brought
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
        self._committed: deque[tuple[Issued, list[Outcome]]] = deque()  # and not yet handed on
        self._suspects = Suspects()
        self._news = asyncio.Event()
        self._held = False
        self._still = asyncio.Event()
        self._failure: DeviceLost | None = None

    def fail(self, error: DeviceLost) -> None:
        """Have `run` raise, also while no step is in flight."""
        self._failure = error
        self.wake()

    def wake(self) -> None:
        """There is something to plan, or a result to take in."""
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
        """Return once it is held and the steps that were in flight are committed."""
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
                self._fill()
                self._hand_on()
                if self._held and not self._in_flight:
                    self._still.set()
                await self._news.wait()
                if self._failure is not None:
                    raise self._failure
                while self._in_flight and self._in_flight[0].result.done():
                    await self._take_in(self._in_flight.popleft())
        finally:
            self._hand_on()  # whatever ends it, what was committed is its readers'

    async def _take_in(self, issued: Issued) -> None:
        """Commit a step, or undo it. Raises DeviceLost."""
        error = issued.result.exception()
        if error is None:
            outcomes = self._scheduler.commit(issued.step, issued.result.result())
        elif isinstance(error, DeviceLost):
            raise error
        else:
            outcomes = await self._recover(issued, error)
        self._committed.append((issued, outcomes))

    def _hand_on(self) -> None:
        while self._committed:
            self._on_commit(*self._committed.popleft())

    def _fill(self) -> None:
        """Issue steps until enough are in flight; while somebody is suspected, one at a time."""
        while not self._held and len(self._in_flight) < self._executor.depth:
            suspects = self._suspects.on_trial
            if suspects is not None and self._in_flight:
                return
            step = self._scheduler.plan(suspects)
            if step is None and suspects is not None:
                self._suspects.dismiss()  # they wait for somebody outside their group
                continue
            if step is None:
                return
            result = self._executor.forward(step.plan).sample()
            result.add_done_callback(lambda _: self._news.set())
            issued = Issued(step, result, self._clock())
            self._in_flight.append(issued)
            self._on_plan(issued)

    async def _recover(self, failed: Issued, error: BaseException) -> list[Outcome]:
        """Undo the failed step and those behind it; fail the sequence that is to blame once it is known."""
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
