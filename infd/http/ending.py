"""When an inference request ends: settle its account, note how long it took, and log it if it was slow.

Duration and log line wait for the event loop's next turn, so that they do not delay the answer.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infd.http.causes import cause
from infd.telemetry import log
from infd.telemetry.slowest import ORDERS, Ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.engine.admission.ticket import Ticket
    from infd.http.backend import Backend
    from infd.http.exchange import Exchange
    from infd.telemetry.slowest import Order


@contextmanager
def ending(exchange: Exchange, ticket: Ticket, backend: Backend) -> Iterator[None]:
    """Run the block that answers a request."""
    try:
        yield
    finally:
        exchange.account.settle(ticket)
        if ticket.choices:
            asyncio.get_running_loop().call_soon(_note, exchange, ticket, backend)


def _note(exchange: Exchange, ticket: Ticket, backend: Backend) -> None:
    """Compare a request that was queued with the slowest, and log it above log.slow_s."""
    model = ticket.adapter or backend.model().names[0]
    summary = ticket.summary()
    summary.pop("adapter", None)

    def why(order: Order = "total") -> str:
        return cause(
            ticket.stages(),
            order,
            computed=ticket.prompt_tokens - ticket.cached_tokens,
            generated=ticket.generated_tokens,
            preemptions=ticket.preemptions,
        )

    backend.engine.slowest.note(
        {"total": summary["total_ms"], "ttft": summary["ttft_ms"], "queue": summary["queue_ms"]},
        lambda: Ended(
            id=exchange.id,
            client=exchange.client,
            tenant=exchange.tenant,
            model=model,
            time=time.time(),
            causes={order: why(order) for order in ORDERS},
            **summary,
        ),
    )
    slow_s = backend.config.log.slow_s
    if slow_s is not None and ticket.age_s >= slow_s:
        stages = ticket.stages()
        log.slow(
            request_id=exchange.id,
            client=exchange.client,
            model=model,
            total_ms=round(sum(stages.values()), 1),
            **stages,
            prompt=ticket.prompt_tokens,
            cached=ticket.cached_tokens,
            generated=ticket.generated_tokens,
            preemptions=ticket.preemptions,
            cause=why(),
        )
