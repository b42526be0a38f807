"""What a run measured, and how many measurements become a few figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from infd.loadgen.load import Settings


class Sample(Struct, kw_only=True):
    """One finished request. Times in seconds.

    ttft_s         from when the request was due to its first text
    gaps_s         between one piece of text and the next
    counted        tokens as the server reported them; else output_tokens counts pieces of text
    """

    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    input_tokens: int
    output_tokens: int
    counted: bool


class Spread(Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Requests(Struct, frozen=True):
    """errors counts the failed ones by kind."""

    completed: int
    failed: int
    errors: dict[str, int]


class Tokens(Struct, frozen=True):
    """counted says by whom: "server" (usage), or "client", which can only count pieces of text."""

    input: int
    output: int
    counted: str


class Throughput(Struct, frozen=True):
    requests_s: float
    output_tokens_s: float
    total_tokens_s: float


class Latency(Struct, frozen=True):
    """In milliseconds; None where nothing was measured.

    inter_token  between one piece of text and the next, over all requests: stalls show here
    per_token    of one request, (e2e - ttft) / (output tokens - 1): whatever the pieces' size
    """

    ttft: Spread | None
    inter_token: Spread | None
    per_token: Spread | None
    e2e: Spread | None


class Report(Struct, frozen=True, kw_only=True):
    """Everything about a run, settings included: it can be repeated from this alone."""

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
    """Summarise; None if there is nothing to summarise."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Spread(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """Interpolate linearly between the two nearest ranks, as numpy does by default."""
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _milliseconds(seconds: Sequence[float]) -> Spread | None:
    return spread([1000 * value for value in seconds])
