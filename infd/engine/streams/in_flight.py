"""Queue choices, deliver their tokens, and end each choice with one terminal event."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from infd.drafting.drafter import NO_DRAFTS
from infd.engine.streams.choice import ChoiceState
from infd.engine.streams.fanout import FanOut
from infd.engine.streams.request_metrics import RequestMetrics
from infd.engine.streams.stream import Choices
from infd.errors import InfdError, RequestFailed, without_frames
from infd.request import FinishReason
from infd.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Many

    from infd.adapters.registry import Adapters
    from infd.constraint import Restriction
    from infd.drafting.drafter import Drafting
    from infd.engine.admission.budget import QueueBudget
    from infd.engine.admission.ticket import Ticket
    from infd.engine.prefix_roots import PrefixRoots
    from infd.engine.steps.constraints import Constraints
    from infd.engine.steps.loop import Issued
    from infd.engine.streams.stream import Stream, Watcher
    from infd.engine.telemetry import Telemetry
    from infd.grammar.protocol import Grammar
    from infd.request import Adapter, Request
    from infd.scheduler.scheduler import Outcome, Scheduler
    from infd.scheduler.sequence import QueuePlace

log = logging.getLogger("infd.engine")


class InFlight:
    """All choices that are queued and have not ended; len() counts the choices.

    accepted  choices queued so far: those that have ended and those in flight
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roots: PrefixRoots,
        adapters: Adapters,
        budget: QueueBudget,
        constraints: Constraints,
        drafting: Drafting,
        telemetry: Telemetry,
        on_change: Callable[[], None],
    ) -> None:
        """on_change: called when a sequence may have become plannable, or a choice has ended."""
        self.accepted = 0
        self._scheduler = scheduler
        self._roots = roots
        self._adapters = adapters
        self._budget = budget
        self._constraints = constraints
        self._drafting = drafting
        self._events = telemetry.events
        self._now = telemetry.now
        self._metrics = RequestMetrics(telemetry.metrics)
        self._on_change = on_change
        self._open: dict[Sequence, tuple[ChoiceState, Ticket]] = {}
        self._fan_out = FanOut(self._deliver, telemetry.now)

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        ticket: Ticket,
        requests: Many[Request],
        watchers: Many[Watcher | None],
        adapter: Adapter | None,
        grammars: Mapping[Restriction, Grammar],
    ) -> Choices:
        """Queue a sequence for each choice of a ticket's requests.

        watchers  one per choice, or None
        adapter   the adapter of all requests; each sequence holds it until the choice's terminal event
        grammars  the grammar of each constraint of the requests
        """
        before = [choice.seq for choice in ticket.choices]
        place = before[0].place if before else None
        ticket.begin_again()
        choices = Choices(watchers, partial(self.resume, ticket))
        streams = iter(choices.streams)
        for number, request in enumerate(requests):
            root = self._roots.of(request, adapter)
            first = None
            for index in range(request.choices):
                drafter = (self._drafting if request.speculative else NO_DRAFTS).drafter(request, root)
                seq = Sequence(request, index, prefix_root=root, adapter=adapter, first=first, drafter=drafter)
                first = first or seq
                if request.continues is not None:
                    seq.continue_from(before[request.continues])
                if request.constraint is not None:
                    self._constraints.add(seq, grammars[request.constraint])
                # The first choice uses the whole step budget until its prompt is planned. Later choices then find the
                # prompt's pages in the prefix index.
                prompt_tokens = 0 if index else len(request.prompt)
                self._queue(seq, next(streams), ticket, place, number=number, prompt_tokens=prompt_tokens)
        self._on_change()
        return choices

    def _queue(
        self,
        seq: Sequence,
        stream: Stream,
        ticket: Ticket,
        place: QueuePlace | None,
        *,
        number: int,
        prompt_tokens: int,
    ) -> None:
        """Queue a choice, and hold the choice's adapter until the terminal event.

        place          place of the ticket's earlier choices in the queue; None: there are none
        number         of the request among the ticket's
        prompt_tokens  0 for later choices of the same prompt
        """
        stream.routing = seq.routing
        choice = ChoiceState(seq, stream, ticket.admitted, self._now(), prompt_tokens)
        self._scheduler.add(seq, place, number=number)
        if seq.adapter is not None:
            self._adapters.keep(seq.adapter)
        self._open[seq] = choice, ticket
        self.accepted += 1
        self._budget.enqueue(ticket.reservation.tenant, prompt_tokens)
        ticket.choices.append(choice)
        ticket.streams.append(stream)
        ticket.prompt_tokens += prompt_tokens
        if seq.complete:
            self._end(seq, FinishReason.LENGTH)

    def end(self, ticket: Ticket, finish: FinishReason | None, error: Exception | None = None) -> int:
        """End a ticket's unfinished choices; return the number of choices ended.

        finish  None: the reader has left
        """
        alive = [choice.seq for choice in ticket.choices if choice.seq in self._open]
        for seq in alive:
            self._end(seq, finish, error)
        return len(alive)

    def retire(self, ticket: Ticket) -> None:
        """End the unfinished choices of a ticket whose reader has left, and observe the ticket's metrics."""
        self.end(ticket, None)
        if ticket.choices:
            self._metrics.retired(ticket.choices)

    def fail_all(self, error: Exception) -> None:
        """Deliver all committed outcomes, then end every choice with one error event."""
        self._fan_out.flush()
        for seq in list(self._open):
            try:
                self._end(seq, FinishReason.ERROR, error)
            except Exception:  # even if the scheduler has failed, the other readers must receive the error
                log.exception("%s could not be removed", seq)

    def resume(self, ticket: Ticket) -> None:
        """Queue the choices of a ticket again, after its reader has caught up."""
        for choice in ticket.choices:
            self._scheduler.resume(choice.seq)
        self._on_change()

    def planned(self, issued: Issued) -> None:
        """Record that the sequences admitted to an issued step have left the queue."""
        for seq in issued.step.admitted:
            choice, ticket = self._open[seq]
            if choice.started is None:
                choice.started = issued.at
                ticket.deadlines.started()
                self._budget.dequeue(ticket.reservation.tenant, choice.prompt_tokens)
                if choice.prompt_tokens:
                    ticket.cached_tokens += seq.prompt_cached or 0
                self._metrics.planned(choice)

    def committed(self, outcomes: list[Outcome]) -> None:
        """Deliver a committed step's outcomes in a later turn of the event loop."""
        self._fan_out.post(outcomes)

    def _deliver(self, outcome: Outcome, now: float) -> None:
        """Push one sequence's outcome to its stream; hold the ticket's choices if the reader is now paused."""
        seq = outcome.seq
        if seq not in self._open:
            return  # the choice ended before the outcome was delivered
        choice, ticket = self._open[seq]
        if outcome.finish is FinishReason.ERROR:
            if not isinstance(seq.failure, InfdError):
                log.error("%s failed", seq, exc_info=seq.failure)
            if seq.failure is not None:
                without_frames(seq.failure)
            self._events.publish("request", "failed", id=seq.request.id, choice=seq.choice, error=repr(seq.failure))
            self._end(seq, FinishReason.ERROR, seq.failure)
            return
        self._metrics.delivered(choice, len(outcome.tokens), now)
        choice.last = now
        if choice.first is None:
            choice.first = now
        stream = choice.stream
        try:
            if outcome.pooled is not None:
                stream.push_pooled(outcome.pooled)
            stopped = stream.push(outcome.tokens, outcome.logprobs, outcome.finish, outcome.prompt_logprobs)
        except Exception as error:
            self._end(seq, FinishReason.ERROR, error)
            raise
        if stopped or outcome.finish is not None:
            self._end(seq, FinishReason.STOP if stopped else outcome.finish)
        elif stream.inbox.full and not self._scheduler.holds(seq):
            for sibling in ticket.choices:  # held until `resume`, when the reader has caught up
                self._scheduler.hold(sibling.seq)

    def _end(self, seq: Sequence, finish: FinishReason | None, error: BaseException | None = None) -> None:
        """Send a choice's terminal event, record the end in the metrics, and release the choice's resources.

        finish  None: the reader has left, and receives no event
        """
        choice, ticket = self._open.pop(seq)
        if choice.started is None:
            self._budget.dequeue(ticket.reservation.tenant, choice.prompt_tokens)
        if finish is not None:  # sent first: the reader must receive it even if a call below raises
            failure = error if isinstance(error, InfdError) else RequestFailed("this request failed")
            choice.stream.end(finish, failure if finish is FinishReason.ERROR else None)
        self._metrics.ended(choice, finish.value if finish else ticket.departure, self._now())
        self._scheduler.remove(seq, finish or FinishReason.ABORT, error)
        self._constraints.remove(seq)
        seq.drafter.finish(seq.tokens)
        self._on_change()
        if seq.adapter is not None:
            self._adapters.release(seq.adapter)
