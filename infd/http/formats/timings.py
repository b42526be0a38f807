"""The durations of a request's phases, reported at the end of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from infd.http.schema.usage import Timings

if TYPE_CHECKING:
    from msgspec import UnsetType

    from infd.engine.admission.ticket import Ticket


def timings(ticket: Ticket) -> Timings | UnsetType:
    """Return the durations and rates of a complete answer; UNSET if the answer has no token."""
    times = ticket.times
    if times.started is None or times.first is None or times.last is None:
        return UNSET
    computed = ticket.prompt_tokens - ticket.cached_tokens
    followers = ticket.generated_tokens - len(ticket.streams)
    prompt_s, predicted_s = times.first - times.started, times.last - times.first
    return Timings(
        queue_ms=_ms(times.started - times.admitted),
        cache_n=ticket.cached_tokens,
        prompt_n=computed,
        prompt_ms=_ms(prompt_s),
        prompt_per_second=_rate(computed, prompt_s),
        predicted_n=ticket.generated_tokens,
        predicted_ms=_ms(predicted_s),
        predicted_per_second=_rate(followers, predicted_s),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if tokens > 0 and seconds > 0 else 0.0
