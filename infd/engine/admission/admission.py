"""Admit requests: reserve places, wait at the gate, prepare, queue. End each request when its caller leaves."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from infd.engine.admission.prepare import AdapterNeed, GrammarNeed, prepare
from infd.engine.admission.ticket import Ticket
from infd.errors import Aborted
from infd.request import ANYONE, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Sequence as Many

    from infd.adapters.registry import Adapters
    from infd.config import LiveConfig
    from infd.constraint import Restriction
    from infd.engine.admission.budget import QueueBudget
    from infd.engine.admission.gate import Gate
    from infd.engine.admission.ticket import Watchers
    from infd.engine.core import EngineCore
    from infd.engine.streams.stream import Choices
    from infd.engine.telemetry import Telemetry
    from infd.errors import RequestError
    from infd.grammar.protocol import Grammar, Grammars
    from infd.request import Adapter, Request, Tenant

BYTES_PER_TOKEN: Final = 4  # estimates a body's prompt tokens until the prompt is read, see `QueueBudget.exchange`


class Admission:
    """The tickets of all requests between `reserve` and `retire`; len() counts the requests.

    A request that is computed in rounds has a ticket of its own, and each of its rounds another.

    budget  bounds the queue
    gate    holds or refuses requests while the engine is not ready
    """

    def __init__(
        self,
        live: LiveConfig,
        core: EngineCore,
        budget: QueueBudget,
        gate: Gate,
        adapters: Adapters,
        grammars: Grammars | None,
        telemetry: Telemetry,
    ) -> None:
        self.budget = budget
        self.gate = gate
        self._live = live
        self._core = core
        self._adapters = adapters
        self._grammars = grammars
        self._telemetry = telemetry
        self._tickets: dict[str, Ticket] = {}
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return sum(ticket.within is None for ticket in self._tickets.values())

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over the tickets, from the oldest to the newest."""
        return iter(self._tickets.values())

    @property
    def unfinished(self) -> int:
        """Choices in flight or being prepared; choices of requests held at the gate do not count."""
        preparing = (ticket for ticket in self if ticket.expired is None and not ticket.held)
        return len(self._core.in_flight) + sum(ticket.reservation.choices for ticket in preparing)

    def require_room(
        self, choices: int = 1, tokens: int = 0, tenant: Tenant = ANYONE, *, admitted: bool = False
    ) -> None:
        """Raise NotReady or Overloaded if a request of this size would be refused now.

        admitted  whether the request is a round of a request admitted earlier
        """
        self.gate.require(admitted=admitted)
        self.budget.require(choices, tokens, len(self._core.scheduler.waiting), tenant)

    def reserve(self, choices: int, body_bytes: int, within: Ticket | None = None, tenant: Tenant = ANYONE) -> Ticket:
        """Return a ticket, with places in the queue reserved until the requests are queued or the ticket is retired.

        within  ticket of the request of which this one is a round

        Raises NotReady, Overloaded, or the error that ended `within`.
        """
        if within is not None and within.expired is not None:
            raise within.expired
        tokens = body_bytes // BYTES_PER_TOKEN
        self.require_room(choices, tokens, tenant, admitted=within is not None)
        reservation = self.budget.reserve(choices, tokens, tenant)
        ticket = Ticket(
            secrets.token_hex(12),
            reservation,
            self._live.now.server,
            self._telemetry.now,
            self._submit,
            self.expire,
            within,
        )
        if within is not None:
            within.round = ticket
        self._tickets[ticket.id] = ticket
        self._empty.clear()
        return ticket

    async def enter(self, ticket: Ticket) -> None:
        """Return once the engine is ready. Raises NotReady, or the error that ended the ticket."""
        admitted = ticket.within is not None
        if self.gate.passes(admitted=admitted):
            return
        ticket.held = True
        try:
            async with ticket.interrupt_if_expired():
                await self.gate.enter(admitted=admitted)
        finally:
            ticket.held = False

    def retire(self, ticket: Ticket) -> None:
        """End the unfinished choices of a ticket whose caller has left, and remove the ticket."""
        ticket.deadlines.cancel()
        self.budget.release(ticket.reservation)
        self._core.in_flight.retire(ticket)
        if ticket.within is not None:
            ticket.within.round = None
        del self._tickets[ticket.id]
        self._core.ended.set()
        if not self._tickets:
            self._empty.set()

    async def emptied(self) -> None:
        """Return once every caller has left, so that there are no tickets."""
        await self._empty.wait()

    def close(self, error: Exception) -> None:
        """Refuse all requests that are not queued yet; end those in rounds with `error`."""
        self._closed = True
        for ticket in self:
            if ticket.in_rounds:
                ticket.expire(error)

    # Ending requests

    def find(self, request_id: str) -> Ticket | None:
        return self._tickets.get(request_id)

    def abort(self, ticket: Ticket) -> int:
        """End a request with "abort"; return the number of choices ended."""
        if ticket.expired is not None:
            return 0
        if ended := self._core.in_flight.end(ticket, FinishReason.ABORT):
            return ended
        ticket.expire(Aborted())
        return ticket.reservation.choices if ticket.round is None else self.abort(ticket.round)

    def abort_all(self) -> int:
        """End all requests with "abort", except requests held at the gate; return the number of choices ended."""
        return sum(self.abort(ticket) for ticket in list(self) if not (ticket.round or ticket).held)

    def expire(self, ticket: Ticket, error: RequestError) -> None:
        """End a request whose time has run out: its unfinished choices or, before it is queued, its wait."""
        if ticket.round is not None:
            self.expire(ticket.round, error)
        if not self._core.in_flight.end(ticket, FinishReason.ERROR, error):
            ticket.expire(error)

    # Queueing

    async def _submit(self, ticket: Ticket, requests: Many[Request], watchers: Watchers, last: bool) -> Choices:
        """Prepare and queue a ticket's requests; see `Ticket.submit`."""
        names = {request.adapter for request in requests} or {None}
        # With several adapters, two tickets could deadlock: each would hold an adapter for which the other waits.
        assert len(names) == 1, "the requests of one ticket ask for one adapter"
        name = names.pop()
        constraints = {request.constraint for request in requests if request.constraint is not None}
        if name is None and not constraints:  # nothing to wait for
            return self._queue(ticket, requests, watchers, last, None, {})
        adapter = AdapterNeed(self._adapters, name)
        grammars = [GrammarNeed(self._grammars, constraint) for constraint in constraints]
        async with ticket.interrupt_if_expired(), prepare([*grammars, adapter]):
            compiled = {need.constraint: need.grammar for need in grammars if need.grammar is not None}
            return self._queue(ticket, requests, watchers, last, adapter.adapter, compiled)

    def _queue(
        self,
        ticket: Ticket,
        requests: Many[Request],
        watchers: Watchers,
        last: bool,
        adapter: Adapter | None,
        grammars: Mapping[Restriction, Grammar],
    ) -> Choices:
        if self._closed or not self._core.loaded:
            raise self.gate.not_ready()
        if ticket.expired is not None:
            raise ticket.expired
        count = tokens = 0
        for request in requests:
            self._core.check(request)
            count += request.choices
            tokens += len(request.prompt)
        if not ticket.choices:
            self.budget.exchange(ticket.reservation, count, tokens, keep=not last)
        return self._core.in_flight.begin(ticket, requests, watchers or [None] * count, adapter, grammars)
