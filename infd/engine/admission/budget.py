"""Bound the queue: the choices and the prompt tokens that may wait.

A request's reservation is estimated from the size of its body, and replaced by the real token counts when the request
is queued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import Overloaded

if TYPE_CHECKING:
    from infd.config import LiveConfig


class Reservation(Struct):
    """Queue places of a request that is not queued yet. Changed by QueueBudget only."""

    choices: int
    tokens: int


class QueueBudget:
    """Counts waiting choices and prompt tokens against `scheduler.max_waiting` and `scheduler.max_waiting_tokens`.

    reserved_choices  choices of requests not queued yet
    queued_tokens     prompt tokens that are reserved, or that are queued and not yet planned
    """

    def __init__(self, live: LiveConfig) -> None:
        self.reserved_choices = 0
        self.queued_tokens = 0
        self._live = live

    def require(self, choices: int, tokens: int, waiting: int) -> None:
        """Raise Overloaded if a request of this size does not fit.

        waiting  choices in the scheduler's queue
        """
        waiting += self.reserved_choices
        if waiting + choices > (most := self._live.now.scheduler.max_waiting):
            raise Overloaded(f"{waiting} choices are waiting, of at most {most}")
        self._require_tokens(tokens, beside=self.queued_tokens)

    def reserve(self, choices: int, tokens: int) -> Reservation:
        self.reserved_choices += choices
        self.queued_tokens += tokens
        return Reservation(choices, tokens)

    def release(self, reservation: Reservation) -> None:
        """Release a reservation. Idempotent."""
        self.reserved_choices -= reservation.choices
        self.queued_tokens -= reservation.tokens
        reservation.choices = reservation.tokens = 0

    def exchange(self, reservation: Reservation, choices: int, tokens: int, *, keep: bool = False) -> None:
        """Release a reservation whose choices are about to be queued; the caller then calls `enqueue` for each choice.

        keep  whether the choices stay reserved, for others that follow once these have ended

        Raises Overloaded if `tokens` prompt tokens do not fit.
        """
        assert choices <= reservation.choices, "more choices than reserved, or submitted twice"
        self._require_tokens(tokens, beside=self.queued_tokens - reservation.tokens)
        kept = reservation.choices if keep else 0
        self.release(reservation)
        reservation.choices = kept
        self.reserved_choices += kept

    def enqueue(self, tokens: int) -> None:
        """Count the prompt of a queued choice until `dequeue`."""
        self.queued_tokens += tokens

    def dequeue(self, tokens: int) -> None:
        """Stop counting the prompt of a choice: its first step is planned, or it has ended without a step."""
        self.queued_tokens -= tokens

    def _require_tokens(self, tokens: int, beside: int) -> None:
        """Raise Overloaded if `tokens` more do not fit. A prompt fits in any case if no other prompt waits."""
        most = self._live.now.scheduler.max_waiting_tokens
        if beside and beside + tokens > most:
            raise Overloaded(f"{beside} prompt tokens are waiting, of at most {most}: {tokens} more would be too many")
