"""Measurements of a load run, and their summary in percentiles and rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from infd.loadgen.settings import Settings


class Sample(Struct, kw_only=True):
    """One completed request.

    ttft_s   seconds from the request's due time to its first text chunk
    e2e_s    seconds from the request's due time to the end of the stream
    gaps_s   seconds between consecutive text chunks
    counted  whether the token counts are those of the server's usage; otherwise output_tokens counts text chunks
    """

    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    input_tokens: int
    output_tokens: int
    counted: bool


class Spread(Struct, frozen=True):
    """Mean, percentiles and maximum of one quantity."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Requests(Struct, frozen=True):
    """Numbers of requests; `errors`: failed requests by kind."""

    completed: int
    failed: int
    errors: dict[str, int]


class Tokens(Struct, frozen=True):
    """Token totals. `counted` is "server" (from usage) or "client" (text chunks counted as tokens)."""

    input: int
    output: int
    counted: str


class Throughput(Struct, frozen=True):
    requests_s: float
    output_tokens_s: float
    total_tokens_s: float


class Latency(Struct, frozen=True):
    """Latencies in milliseconds; None: no value was measured.

    inter_token  time between consecutive text chunks of a request, over all requests; shows stalls
    per_token    (e2e - ttft) / (output tokens - 1) of each request; independent of the chunks' sizes
    """

    ttft: Spread | None
    inter_token: Spread | None
    per_token: Spread | None
    e2e: Spread | None


class Report(Struct, frozen=True, kw_only=True):
    """The measurements of a load run, and the settings with which to repeat the run."""

    settings: Settings
    model: str
    started: str  # ISO 8601
    duration_s: float
    requests: Requests
    tokens: Tokens
    throughput: Throughput
    latency_ms: Latency


def summarise(
    settings: Settings, model: str, started: str, duration_s: float, samples: Sequence[Sample], errors: dict[str, int]
) -> Report:
    """Summarise a run's completed requests (`samples`) and its failures by kind (`errors`)."""
    inputs = sum(sample.input_tokens for sample in samples)
    outputs = sum(sample.output_tokens for sample in samples)
    per_token = [
        (sample.e2e_s - sample.ttft_s) / (sample.output_tokens - 1) for sample in samples if sample.output_tokens > 1
    ]
    return Report(
        settings=settings,
        model=model,
        started=started,
        duration_s=duration_s,
        requests=Requests(len(samples), sum(errors.values()), errors),
        tokens=Tokens(inputs, outputs, "server" if all(sample.counted for sample in samples) else "client"),
        throughput=Throughput(len(samples) / duration_s, outputs / duration_s, (inputs + outputs) / duration_s),
        latency_ms=Latency(
            ttft=_milliseconds([sample.ttft_s for sample in samples]),
            inter_token=_milliseconds([gap for sample in samples for gap in sample.gaps_s]),
            per_token=_milliseconds(per_token),
            e2e=_milliseconds([sample.e2e_s for sample in samples]),
        ),
    )


def spread(values: Collection[float]) -> Spread | None:
    """Return mean, percentiles and maximum of `values`; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Spread(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return percentile `q` (0 to 100) of sorted values, linearly interpolated as by numpy's default."""
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _milliseconds(seconds: Sequence[float]) -> Spread | None:
    return spread([1000 * value for value in seconds])
