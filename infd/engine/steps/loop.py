"""The step loop: plan, issue and commit steps, so that the device always has work.

When a result arrives, the loop commits the step, plans and issues the next
step, and only then delivers tokens, so that the device never waits for
readers. A step with constrained choices is issued like any other step, but
samples only once its mask is filled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.engine.steps.suspects import Suspects
from infd.errors import DeviceLost, StepTooLarge, without_frames
from infd.request import FinishReason
from infd.scheduler.scheduler import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from infd.engine.executor import Executor, Step
    from infd.engine.steps.constraints import Constraints, Filled
    from infd.scheduler.plan import StepResult
    from infd.scheduler.scheduler import Scheduled, Scheduler
    from infd.scheduler.speculation import Speculation
    from infd.telemetry.events import Events

    Mask = npt.NDArray[Any]

log = logging.getLogger("infd.engine")


class Issued(Struct):
    """A step in flight.

    at           time before the step was planned, monotonic seconds
    constrained  whether the step may sample only once `filled` is done
    late         whether it was issued only once the step before was committed, although others are issued ahead
    filled       future of the step's mask; None until filling begins
    result       future of the step's result; None until the step may sample
    """

    step: Scheduled
    forwarded: Step
    at: float
    constrained: bool
    late: bool = False
    filled: asyncio.Future[Filled] | None = None
    result: asyncio.Future[StepResult] | None = None


class StepLoop:
    """Plans, issues and commits steps, with up to `executor.depth` or `executor.decoding_depth` steps in flight.

    constraints  the matchers of the constrained choices in flight
    on_plan      called with each step when it is issued
    on_commit    called with each committed step and its outcomes, after the next step is issued
    on_end       called with the outcome of a choice whose grammar is complete or has failed
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        constraints: Constraints,
        events: Events,
        clock: Callable[[], float],
        on_plan: Callable[[Issued], None],
        on_commit: Callable[[Issued, list[Outcome]], None],
        on_end: Callable[[list[Outcome]], None],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._constraints = constraints
        self._events = events
        self._clock = clock
        self._on_plan = on_plan
        self._on_commit = on_commit
        self._on_end = on_end
        self._in_flight: deque[Issued] = deque()
        self._committed: deque[tuple[Issued, list[Outcome]]] = deque()  # steps for which on_commit is not called yet
        self._last = 0.0  # time of the last commit, if drafts are made
        self._timed: tuple[Speculation, Issued, float] | None = None  # a step, and its seconds; see `_learn`
        self._suspects = Suspects()
        self._stale = True  # whether `wake` was called since the last plan
        self._sleep: asyncio.Future[None] | None = None  # for which `run` waits until it is stale
        self._held = False
        self._settled = asyncio.Event()
        self._failure: DeviceLost | None = None

    def fail(self, error: DeviceLost) -> None:
        """Make `run` raise `error`, even if no step is in flight."""
        self._failure = error
        self.wake()

    def wake(self) -> None:
        """Plan again, because a sequence may have become plannable."""
        self._stale = True
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    def hold(self) -> None:
        """Issue no more steps until `resume`."""
        if not self._held:
            self._held = True
            self._settled.clear()
            self.wake()

    def resume(self) -> None:
        """Issue steps again."""
        self._held = False
        self.wake()

    @property
    def held(self) -> bool:
        return self._held

    async def settled(self) -> None:
        """Return once the loop is held and no step is in flight."""
        await self._settled.wait()

    @property
    def in_flight(self) -> int:
        """Steps issued and not yet committed."""
        return len(self._in_flight)

    async def run(self) -> None:
        """Run until cancelled. Raises DeviceLost."""
        try:
            while True:
                self._stale = False
                self._issue()
                self._deliver()
                self._sample()  # begins masks, now that the device thread, which wants the interpreter too, has begun
                if self._held and not self._in_flight:
                    self._settled.set()
                if not self._stale:
                    self._sleep = asyncio.get_running_loop().create_future()
                    await self._sleep
                if self._failure is not None:
                    raise self._failure
                while self._in_flight and (result := self._in_flight[0].result) is not None and result.done():
                    await self._commit(self._in_flight.popleft(), result)
                self._sample()
        finally:
            self._deliver()  # even if a step or the device failed, readers receive the committed tokens

    async def _commit(self, issued: Issued, result: asyncio.Future[StepResult]) -> None:
        """Commit a step, or undo a failed step. Raises DeviceLost."""
        self._learn()
        error = result.exception()
        if error is None:
            outcomes = self._scheduler.commit(issued.step, result.result())
            if (speculation := self._scheduler.speculation).most:
                now = self._clock()
                self._timed = speculation, issued, now - max(issued.at, self._last)
                self._last = now
        elif isinstance(error, DeviceLost):
            raise error
        else:
            outcomes = await self._recover(issued, error)
        self._committed.append((issued, outcomes))

    def _learn(self) -> None:
        """Let speculation learn what the last step cost. The next step need not wait for that."""
        if self._timed is not None:
            speculation, issued, seconds = self._timed
            self._timed = None
            speculation.took(issued.step.plan, seconds, masked=issued.constrained, late=issued.late)

    def _deliver(self) -> None:
        self._learn()
        while self._committed:
            self._on_commit(*self._committed.popleft())

    def _issue(self) -> None:
        """Issue steps until enough are in flight; while sequences are suspected, only one at a time.

        A prompt waits for the steps issued before it, so only short steps are issued ahead of `executor.depth`.
        """
        while not self._held and (flying := len(self._in_flight)) < self._executor.decoding_depth:
            ahead = flying >= self._executor.depth
            if ahead and not self._scheduler.may_plan_ahead:
                return
            suspects = self._suspects.current_group
            if suspects is not None and self._in_flight:
                return
            at = self._clock()
            step = self._scheduler.plan(suspects, ahead=ahead)
            if step is None and suspects is not None:
                self._suspects.clear_group()  # no suspect can run before a sequence outside of the group
                continue
            if step is None:
                return
            late = not ahead and self._executor.decoding_depth > self._executor.depth
            forwarded = self._executor.forward(step.plan)
            issued = Issued(step, forwarded, at, self._constraints.applies_to(step), late)
            self._in_flight.append(issued)
            if not issued.constrained:
                self._sample()
            self._on_plan(issued)

    def _sample(self) -> None:
        """Permit steps to sample, in order, up to the first step that waits for a mask.

        A mask is filled once all earlier steps are committed, because its matchers read every earlier token.
        """
        for issued in self._in_flight:
            if issued.result is not None:
                continue
            if not issued.constrained:
                self._let_sample(issued, None)
                continue
            if issued.filled is None and issued is self._in_flight[0]:
                issued.filled = self._constraints.fill(issued.step)
                issued.filled.add_done_callback(self._on_done)
            if issued.filled is None or not issued.filled.done():
                return
            filled = issued.filled.result()
            self._let_sample(issued, filled.mask)
            self._end(filled)

    def _let_sample(self, issued: Issued, mask: Mask | None) -> None:
        issued.result = issued.forwarded.sample(mask)
        issued.result.add_done_callback(self._on_done)

    def _end(self, filled: Filled) -> None:
        """End the choices whose grammars are complete or have failed, before their step is committed."""
        for ended in filled.ended:
            finish = FinishReason.STOP if ended.failure is None else FinishReason.ERROR
            if ended.seq.finish is None:
                self._scheduler.remove(ended.seq, finish, ended.failure)
                self._deliver()
                self._on_end([Outcome(ended.seq, [], [], finish)])

    def _on_done(self, _: object) -> None:
        self.wake()

    async def _recover(self, failed: Issued, error: BaseException) -> list[Outcome]:
        """Undo the failed step and all later steps in flight.

        If the step was too large for memory, halve the token budget where possible. Otherwise bisect the step's
        sequences; once the sequence that makes steps fail is found, end that sequence and return the outcome.
        """
        number, sequences = failed.step.plan.number, len(failed.step.sequences)
        log.error("step %d of %d sequences failed", number, sequences, exc_info=error)
        without_frames(error)
        self._events.publish("step", "failed", number=number, sequences=sequences, error=repr(error))
        following = list(self._in_flight)
        for issued in following:
            if issued.result is None:  # a step that never samples would block the device
                self._let_sample(issued, None)
        await asyncio.gather(*(issued.result for issued in following if issued.result), return_exceptions=True)
        self._in_flight.clear()
        self._scheduler.rollback([failed.step, *(issued.step for issued in following)])
        self._scheduler.verify()
        if isinstance(error, StepTooLarge) and self._scheduler.shrink(failed.step):
            return []
        culprit = self._suspects.bisect(failed.step)
        if culprit is None:
            return []
        self._scheduler.remove(culprit, FinishReason.ERROR, error)
        return [Outcome(culprit, [], [], FinishReason.ERROR)]
