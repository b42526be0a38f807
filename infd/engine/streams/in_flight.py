"""Follow every choice from the queue to its one terminal event, and hand on what comes for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from infd.engine.admission.ticket import ChoiceState
from infd.engine.streams.fanout import FanOut
from infd.engine.streams.stream import PENDING_BYTES
from infd.errors import InfdError, RequestFailed, without_frames
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.engine.admission.ticket import Ticket
    from infd.engine.engine import Engine
    from infd.engine.steps.loop import Issued
    from infd.engine.streams.request_metrics import RequestMetrics
    from infd.engine.streams.stream import Stream
    from infd.scheduler.scheduler import Outcome, Scheduler
    from infd.scheduler.sequence import Sequence

log = logging.getLogger("infd.engine")


class InFlight:
    """All choices that have been queued and have not ended. Their number is its length."""

    def __init__(self, engine: Engine, scheduler: Scheduler, measure: RequestMetrics, wake: Callable[[], None]) -> None:
        """wake: called when there may be something new to plan."""
        self._engine = engine
        self._scheduler = scheduler
        self._measure = measure
        self._wake = wake
        self._alive: dict[Sequence, tuple[ChoiceState, Ticket]] = {}
        self._fan_out = FanOut(self._deliver, engine.now)

    def __len__(self) -> int:
        return len(self._alive)

    def begin(self, seq: Sequence, stream: Stream, ticket: Ticket, *, prompt_tokens: int) -> None:
        """Queue a choice. Its adapter is kept until its terminal event.

        prompt_tokens  that it adds to those that wait: none where a sibling before it has the same prompt
        """
        engine = self._engine
        flow = ChoiceState(seq, stream, ticket.admitted, engine.now(), prompt_tokens)
        self._scheduler.add(seq)
        if seq.adapter is not None:
            engine.adapters.keep(seq.adapter)
        self._alive[seq] = flow, ticket
        engine.gate.queued_tokens += prompt_tokens
        ticket.choices.append(flow)
        ticket.prompt_tokens += prompt_tokens
        if seq.complete:
            self._end(seq, FinishReason.LENGTH)

    def end(self, ticket: Ticket, finish: FinishReason | None, error: Exception | None = None) -> int:
        """End those of a ticket's choices that have not ended; return how many. None: their reader has gone."""
        alive = [flow.seq for flow in ticket.choices if flow.seq in self._alive]
        for seq in alive:
            self._end(seq, finish, error)
        return len(alive)

    def fail_all(self, error: Exception) -> None:
        """End every choice with one error event, behind all that was committed for it."""
        self._fan_out.flush()
        for seq in list(self._alive):
            try:
                self._end(seq, FinishReason.ERROR, error)
            except Exception:  # the scheduler may be what failed; the next reader must hear of it all the same
                log.exception("%s could not be removed", seq)

    def resume(self, ticket: Ticket) -> None:
        """The reader of a ticket's choices has caught up."""
        for flow in ticket.choices:
            self._scheduler.resume(flow.seq)
        self._wake()

    def planned(self, issued: Issued) -> None:
        """A step was issued: who joins with it waits no longer."""
        for seq in issued.step.admitted:
            flow, ticket = self._alive[seq]
            if flow.started is None:
                flow.started = issued.at
                ticket.deadlines.started()
                self._engine.gate.queued_tokens -= flow.prompt_tokens
                if flow.prompt_tokens:
                    ticket.cached_tokens += seq.prompt_cached or 0
                self._measure.planned(flow)

    def committed(self, outcomes: list[Outcome]) -> None:
        """A step was committed: hand on what it brought, as soon as nothing more urgent is to be done."""
        self._fan_out.post(outcomes)

    def _deliver(self, outcome: Outcome, now: float) -> None:
        """Hand one sequence's news to its stream."""
        seq = outcome.seq
        if seq not in self._alive:
            return  # its reader left, or it was ended, while this was on its way
        flow, ticket = self._alive[seq]
        if outcome.finish is FinishReason.ERROR:
            if not isinstance(seq.failure, InfdError):
                log.error("%s failed", seq, exc_info=seq.failure)
            if seq.failure is not None:
                without_frames(seq.failure)
            self._engine.events.tell("request", "failed", id=seq.request.id, choice=seq.choice, error=repr(seq.failure))
            self._end(seq, FinishReason.ERROR, seq.failure)
            return
        self._measure.delivered(flow, len(outcome.tokens), now)
        flow.last = now
        if flow.first is None:
            flow.first = now
        stream = flow.stream
        try:
            stopped = stream.push(outcome.tokens, outcome.logprobs, outcome.finish, outcome.prompt_logprobs)
        except Exception as error:
            self._end(seq, FinishReason.ERROR, error)
            raise
        if stopped or outcome.finish is not None:
            self._end(seq, FinishReason.STOP if stopped else outcome.finish)
        elif stream.inbox.pending_bytes > PENDING_BYTES and not self._scheduler.holds(seq):
            for each in ticket.choices:  # they go on when their reader has caught up
                self._scheduler.hold(each.seq)

    def _end(self, seq: Sequence, finish: FinishReason | None, error: BaseException | None = None) -> None:
        """Give a choice its one terminal event. None: its reader has gone."""
        engine = self._engine
        flow, ticket = self._alive.pop(seq)
        if flow.started is None:
            engine.gate.queued_tokens -= flow.prompt_tokens
        if finish is not None:  # its reader hears of it whatever happens below
            failure = error if isinstance(error, InfdError) else RequestFailed("this request failed")
            flow.stream.end(finish, failure if finish is FinishReason.ERROR else None)
        self._measure.ended(flow, finish.value if finish else ticket.departure, engine.now())
        self._scheduler.remove(seq, finish or FinishReason.ABORT, error)
        self._wake()
        if seq.adapter is not None:
            engine.adapters.release(seq.adapter)
        engine.control.look()
