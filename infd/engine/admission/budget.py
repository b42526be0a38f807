"""Bound the queue: the choices and the prompt tokens that may wait.

A request's reservation is estimated from the size of its body, and replaced by the real token counts when the request
is queued. When the queue is full, tenants that hold less than their share of it may still queue requests, so that one
tenant's flood does not cause refusals of other tenants. The queue then holds less than twice its bounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.engine.admission.turnover import Turnover
from infd.errors import Overloaded
from infd.request import ANYONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import LiveConfig
    from infd.request import Tenant


class Reservation(Struct):
    """Queue places of a request that is not queued yet. Changed by QueueBudget only."""

    choices: int
    tokens: int
    tenant: Tenant = ANYONE


class Portion(Struct):
    """One tenant's part of the queue."""

    share: float
    choices: int = 0
    tokens: int = 0


class QueueBudget:
    """Counts waiting choices and prompt tokens against `scheduler.max_waiting` and `scheduler.max_waiting_tokens`.

    reserved_choices  choices of requests not queued yet
    queued_tokens     prompt tokens that are reserved, or that are queued and not yet planned
    """

    def __init__(self, live: LiveConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.reserved_choices = 0
        self.queued_tokens = 0
        self._live = live
        self._choices, self._tokens = Turnover(now), Turnover(now)
        self._portions: dict[str, Portion] = {}  # by the name of the tenant

    def require(self, choices: int, tokens: int, waiting: int, tenant: Tenant = ANYONE) -> None:
        """Raise Overloaded, with the time until there will be room, if a request of this size does not fit.

        waiting  choices in the scheduler's queue
        """
        waiting += self.reserved_choices
        if waiting + choices > (most := self._live.now.scheduler.max_waiting):
            share, portion = self._share(tenant)
            if portion.choices + choices > most * share:
                wait_s = self._choices.wait_s(waiting + choices - most)
                raise Overloaded(
                    f"{waiting} choices are waiting, of at most {most} (scheduler.max_waiting)", retry_after_s=wait_s
                )
        self._require_tokens(tokens, self.queued_tokens, tenant)

    def reserve(self, choices: int, tokens: int, tenant: Tenant = ANYONE) -> Reservation:
        self.reserved_choices += choices
        self._hold(tenant, choices, tokens)
        return Reservation(choices, tokens, tenant)

    def release(self, reservation: Reservation) -> None:
        """Release a reservation. Idempotent."""
        if not (reservation.choices or reservation.tokens):
            return
        self.reserved_choices -= reservation.choices
        self._hold(reservation.tenant, -reservation.choices, -reservation.tokens)
        reservation.choices = reservation.tokens = 0

    def exchange(self, reservation: Reservation, choices: int, tokens: int, *, keep: bool = False) -> None:
        """Release a reservation whose choices are about to be queued; the caller then calls `enqueue` for each choice.

        keep  whether the choices stay reserved, for others that follow once these have ended

        Raises Overloaded if `tokens` prompt tokens do not fit.
        """
        assert choices <= reservation.choices, "more choices than reserved, or submitted twice"
        self._require_tokens(tokens, self.queued_tokens - reservation.tokens, reservation.tenant, reservation.tokens)
        kept = reservation.choices
        self.release(reservation)
        if keep:
            reservation.choices = kept
            self.reserved_choices += kept
            self._hold(reservation.tenant, kept, 0)

    def enqueue(self, tenant: Tenant, tokens: int) -> None:
        """Count a queued choice and its prompt until `dequeue`."""
        self._hold(tenant, 1, tokens)
        self._choices.enter(1)
        self._tokens.enter(tokens)

    def dequeue(self, tenant: Tenant, tokens: int) -> None:
        """Stop counting a choice: its first step is planned, or it has ended without a step."""
        self._hold(tenant, -1, -tokens)
        self._choices.leave(1)
        self._tokens.leave(tokens)

    def _hold(self, tenant: Tenant, choices: int, tokens: int) -> None:
        """Add choices, reserved or queued, and prompt tokens to a tenant's part of the queue."""
        self.queued_tokens += tokens
        portion = self._portions.get(tenant.name)
        if portion is None:
            portion = self._portions[tenant.name] = Portion(tenant.share)
        portion.share = tenant.share
        portion.choices += choices
        portion.tokens += tokens
        if not portion.choices and not portion.tokens:
            del self._portions[tenant.name]

    def _share(self, tenant: Tenant) -> tuple[float, Portion]:
        """Return a tenant's share of a full queue, 0 if no other tenant holds part of it, and its own part."""
        others = sum(portion.share for name, portion in self._portions.items() if name != tenant.name)
        share = tenant.share / (tenant.share + others) if others else 0.0
        return share, self._portions.get(tenant.name) or Portion(tenant.share)

    def _require_tokens(self, tokens: int, beside: int, tenant: Tenant, reserved: int = 0) -> None:
        """Raise Overloaded if `tokens` more do not fit. A prompt fits in any case if no other prompt waits.

        beside    queued tokens of other requests
        reserved  tokens that the request's own reservation holds
        """
        most = self._live.now.scheduler.max_waiting_tokens
        if beside and beside + tokens > most:
            share, portion = self._share(tenant)
            if portion.tokens - reserved + tokens <= most * share:
                return
            raise Overloaded(
                f"{beside} prompt tokens are waiting, of at most {most} (scheduler.max_waiting_tokens):"
                f" {tokens} more would be too many",
                retry_after_s=self._tokens.wait_s(beside + tokens - most),
            )
