"""When an inference request ends: settle its account, note how long it took, and log it if it was slow.

Duration and log line wait for the event loop's next turn, so that they do not delay the answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from infd.telemetry import log
from infd.telemetry.slowest import Ended

if TYPE_CHECKING:
    from infd.engine.admission.ticket import Ticket
    from infd.http.backend import Backend
    from infd.http.exchange import Exchange


def end(exchange: Exchange, ticket: Ticket, backend: Backend) -> None:
    """End a request, answered or not."""
    exchange.account.settle(ticket)
    if ticket.choices:
        asyncio.get_running_loop().call_soon(_note, exchange, ticket, backend)


def _note(exchange: Exchange, ticket: Ticket, backend: Backend) -> None:
    """Compare a request that was queued with the slowest, and log it above log.slow_s."""
    summary = ticket.summary()
    model = summary.pop("adapter", None) or backend.model().names[0]

    def ended() -> Ended:
        return Ended(
            id=exchange.id,
            client=exchange.client,
            tenant=exchange.tenant,
            model=model,
            time=time.time(),
            stages=ticket.stages(),
            preemptions=ticket.preemptions,
            **summary,
        )

    backend.engine.slowest.note(
        {"total": summary["total_ms"], "ttft": summary["ttft_ms"], "queue": summary["queue_ms"]}, ended
    )
    slow_s = backend.config.log.slow_s
    if slow_s is not None and ticket.age_s >= slow_s:
        request = ended()
        log.slow(
            request_id=request.id,
            client=request.client,
            model=model,
            total_ms=round(sum(request.stages.values()), 1),
            **request.stages,
            prompt=request.prompt,
            cached=request.cached,
            generated=request.generated,
            preemptions=request.preemptions,
            cause=request.cause("total"),
        )
