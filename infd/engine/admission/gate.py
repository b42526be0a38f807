"""Decide who may come in: within the queue's bounds and, while the engine rests, after a wait outside.

Whoever waits outside has a place in the queue already, so that those who wait are bounded as those inside are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from infd.engine.lifecycle.state import State
from infd.errors import NotReady, Overloaded

if TYPE_CHECKING:
    from infd.config import Config
    from infd.engine.admission.ticket import Ticket
    from infd.engine.lifecycle.state import Lifecycle


class Gate:
    """Counts places, and opens when the engine is ready.

    reserved_choices  of tickets not yet submitted
    queued_tokens     prompt tokens reserved, or submitted and not yet planned
    holds             whether new requests wait while the engine is not ready, rather than be refused
    """

    def __init__(self, config: Config, lifecycle: Lifecycle) -> None:
        self.reserved_choices = 0
        self.queued_tokens = 0
        self.holds = False
        self._bounds = config.scheduler
        self._hold_s = config.server.hold_timeout_s
        self._lifecycle = lifecycle
        self._outside: dict[Ticket, asyncio.Future[None]] = {}

    @property
    def open(self) -> bool:
        return self._lifecycle.state is State.READY

    @property
    def outside(self) -> int:
        """How many requests wait for the door to open."""
        return len(self._outside)

    def is_outside(self, ticket: Ticket) -> bool:
        return ticket in self._outside

    def require(self, choices: int, tokens: int, waiting: int) -> None:
        """Raise NotReady or Overloaded where a request of this size would be refused.

        waiting  choices that are queued
        """
        if not (self.open or self.holds):
            raise self._not_ready()
        waiting += self.reserved_choices
        if waiting + choices > self._bounds.max_waiting:
            raise Overloaded(f"{waiting} choices are waiting, of at most {self._bounds.max_waiting}")
        self.require_tokens(tokens, self.queued_tokens)

    def require_tokens(self, tokens: int, queued: int) -> None:
        """Raise Overloaded where the queue has no room for these beside those `queued`. Any one prompt fits."""
        most = self._bounds.max_waiting_tokens
        if queued and queued + tokens > most:
            raise Overloaded(f"{queued} prompt tokens are waiting, of at most {most}: {tokens} more would be too many")

    def reserve(self, ticket: Ticket) -> None:
        self.reserved_choices += ticket.reserved_choices
        self.queued_tokens += ticket.reserved_tokens

    def unreserve(self, ticket: Ticket) -> None:
        """Give back what a ticket still holds. Harmless when repeated."""
        self.reserved_choices -= ticket.reserved_choices
        self.queued_tokens -= ticket.reserved_tokens
        ticket.reserved_choices = ticket.reserved_tokens = 0

    async def enter(self, ticket: Ticket) -> None:
        """Return once the door is open. Raises NotReady, or what ended the ticket."""
        if self.open:
            return
        try:
            async with asyncio.timeout(self._hold_s):
                while not self.open:
                    if not self.holds:
                        raise self._not_ready()
                    self._outside[ticket] = asyncio.get_running_loop().create_future()
                    await self._outside[ticket]
                    if ticket.expired is not None:
                        raise ticket.expired
        except TimeoutError:
            raise self._not_ready(f"the request waited {self._hold_s:g} s for it, as long as one may") from None
        finally:
            self._outside.pop(ticket, None)

    def turn_away(self, reason: str) -> None:
        """Refuse all who wait outside."""
        for waiter in self._outside.values():
            if not waiter.done():
                waiter.set_exception(self._not_ready(reason))

    def look(self) -> None:
        """Let all who wait outside look again whether they may come in, in the order in which they came."""
        for ticket in self._outside:
            self.call(ticket)

    def call(self, ticket: Ticket) -> None:
        """Let one of them look, if it is there."""
        waiter = self._outside.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _not_ready(self, reason: str = "") -> NotReady:
        return NotReady(self._lifecycle.state.value, reason or self._lifecycle.reason)
