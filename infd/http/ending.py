"""When an inference request ends: settle its account, and log it if it was slow."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from infd.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        slow_s = backend.config.log.slow_s
        if slow_s is not None and ticket.choices and ticket.age_s >= slow_s:
            log.slow(**_fields(exchange, ticket, backend))


def _fields(exchange: Exchange, ticket: Ticket, backend: Backend) -> dict[str, object]:
    """Return the fields of a slow request's log record: key, tokens, the time of each stage, and the likely cause."""
    stages = ticket.stages()
    slowest = max(stages, key=stages.__getitem__)
    generated, decode_ms = ticket.generated_tokens, stages["decode_ms"]
    cause = HINTS[slowest]
    if slowest == "decode_ms":
        cause += f" ({generated} tokens, {decode_ms / max(1, generated - 1):.1f} ms each)"
    elif slowest == "prefill_ms":
        cause += f" ({ticket.prompt_tokens - ticket.cached_tokens} tokens computed)"
    if ticket.preemptions:
        cause += f"; preempted {ticket.preemptions} times, because pages ran out or a tenant was beyond its share"
    return {
        "request_id": exchange.id,
        "client": exchange.client,
        "model": ticket.adapter or backend.model().names[0],
        "total_ms": round(sum(stages.values()), 1),
        **stages,
        "prompt": ticket.prompt_tokens,
        "cached": ticket.cached_tokens,
        "generated": generated,
        "preemptions": ticket.preemptions,
        "cause": cause,
    }
