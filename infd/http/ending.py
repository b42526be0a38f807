"""When an inference request ends: settle its account, note how long it took, and log it if it was slow."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from infd.telemetry import log
from infd.telemetry.slowest import Ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infd.engine.admission.ticket import Ticket
    from infd.http.backend import Backend
    from infd.http.exchange import Exchange

HINTS: Final = {
    "prepare_ms": "the prompt, its grammar or its adapter took long to prepare, or the server was paused",
    "queue_ms": "it waited for a place among the running requests",
    "prefill_ms": "its prompt was long, or waited for the prompts of others",
    "decode_ms": "its answer was long, or steps were slow",
    "send_ms": "the client read slowly",
}


@contextmanager
def ending(exchange: Exchange, ticket: Ticket, backend: Backend) -> Iterator[None]:
    """Run the block that answers a request."""
    try:
        yield
    finally:
        exchange.account.settle(ticket)
        if ticket.choices:
            _note(exchange, ticket, backend)


def _note(exchange: Exchange, ticket: Ticket, backend: Backend) -> None:
    """Compare a request that was queued with the slowest, and log it above log.slow_s."""
    model = ticket.adapter or backend.model().names[0]
    told = ticket.summary()
    told.pop("adapter", None)
    backend.engine.slowest.note(
        {"total": told["total_ms"], "ttft": told["ttft_ms"], "queue": told["queue_ms"]},
        lambda: Ended(
            id=exchange.id,
            client=exchange.client,
            tenant=exchange.tenant,
            model=model,
            time=time.time(),
            cause=_cause(ticket, ticket.stages()),
            **told,
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
            cause=_cause(ticket, stages),
        )


def _cause(ticket: Ticket, stages: Mapping[str, float]) -> str:
    """Return the likely cause of a slow request: the stage that took longest."""
    slowest = max(stages, key=stages.__getitem__)
    cause = HINTS[slowest]
    if slowest == "decode_ms":
        generated = ticket.generated_tokens
        cause += f" ({generated} tokens, {stages[slowest] / max(1, generated - 1):.1f} ms each)"
    elif slowest == "prefill_ms":
        cause += f" ({ticket.prompt_tokens - ticket.cached_tokens} tokens computed)"
    if ticket.preemptions:
        cause += f"; preempted {ticket.preemptions} times, because pages ran out or a tenant was beyond its share"
    return cause
