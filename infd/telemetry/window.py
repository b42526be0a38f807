"""Percentiles and rates of the last seconds, from the counters that the daemon counts anyway.

A second's sample is a copy of some counters. What happened within a window is the difference
between the counters now and an earlier sample, so the hot path records nothing for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.telemetry.metrics import Histogram, Metrics

SAMPLE_S: Final = 1.0
WINDOW_S: Final = 30.0  # of percentiles and ratios
RATE_S: Final = 5.0  # of rates
_TIMED = ("step", "ttft", "inter_token", "loop_lag")


class Spread(Struct, frozen=True):
    """Percentiles in seconds of `count` values, at most 5 % off; None without values."""

    p50: float | None = None
    p99: float | None = None
    count: int = 0


class Sample(Struct, frozen=True):
    """Counters at one time; attributes as in Metrics.

    at          monotonic seconds
    computed    tokens that steps computed
    ended       choices that ended
    kept        drafts kept
    timed       counts of the histograms named by _TIMED
    """

    at: float
    prompt_tokens: int
    generation_tokens: int
    computed: int
    ended: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    drafts: int
    kept: int
    timed: tuple[list[int], ...]

    @classmethod
    def of(cls, metrics: Metrics, at: float, before: Sample | None = None) -> Sample:
        """Copy the counters. Counts that equal those of `before` share its lists, so idle samples take no memory."""
        counts = [getattr(metrics, name).counts for name in _TIMED]
        known = before.timed if before is not None else counts
        return cls(
            at=at,
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            computed=int(metrics.step_tokens.sum),
            ended=sum(metrics.terminal.values()),
            preemptions=metrics.preemptions,
            prefix_queries=metrics.prefix_queries,
            prefix_hits=metrics.prefix_hits,
            drafts=metrics.drafts,
            kept=sum(metrics.accepted_drafts),
            timed=tuple(
                old if before is not None and old == new else new.copy() for old, new in zip(known, counts, strict=True)
            ),
        )


class Recent(Struct, frozen=True):
    """What happened within the windows. The feed `top` sends it, so later versions only add fields.

    window_s         seconds that percentiles, ratios and `preemptions` cover; less after a start
    rate_s           seconds that the rates cover, which end in _s; less after a start
    prompt_tokens_s  prompt tokens of choices that generated their first token; computed_tokens_s: tokens that steps
                     computed
    ended_s          choices that ended
    tokens_a_step    mean of the computed tokens; None without steps
    hit_rate         share of looked-up prompt tokens that were in the cache; None without look-ups
    drafts_kept      drafts kept for each step of a choice that verified drafts; None without drafts
    step, ttft, inter_token, loop_lag    durations of steps, from arrival to first token, between tokens of a choice,
                     and the event loop's delay while steps run
    """

    window_s: float
    rate_s: float
    prompt_tokens_s: float
    generated_tokens_s: float
    computed_tokens_s: float
    ended_s: float
    steps_s: float
    preemptions: int
    tokens_a_step: float | None
    hit_rate: float | None
    drafts_kept: float | None
    step: Spread
    ttft: Spread
    inter_token: Spread
    loop_lag: Spread


class Window:
    """Samples of the last WINDOW_S seconds.

    began  when the window was created, monotonic seconds
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self.began = clock()
        # One more than a window's, so that the oldest is as old as the window.
        self._samples = deque([Sample.of(metrics, self.began)], maxlen=int(WINDOW_S / SAMPLE_S) + 1)

    @property
    def age_s(self) -> float:
        return self._clock() - self.began

    async def run(self) -> None:
        """Take a sample every SAMPLE_S until cancelled."""
        import asyncio  # here: infdctl, which reads Recent, starts without it

        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        self._samples.append(Sample.of(self._metrics, self._clock(), self._samples[-1]))

    def recent(self) -> Recent:
        """Return the figures from the windows' start until now."""
        now = Sample.of(self._metrics, self._clock())
        first = self._before(now.at - WINDOW_S)
        near = self._before(now.at - RATE_S)
        rate_s = now.at - near.at
        steps, near_steps = (sum(now.timed[0]) - sum(sample.timed[0]) for sample in (first, near))
        spreads = {
            name: spread(getattr(self._metrics, name), old) for name, old in zip(_TIMED, first.timed, strict=True)
        }

        def rate(count: int) -> float:
            return count / rate_s if rate_s > 0 else 0.0

        return Recent(
            window_s=now.at - first.at,
            rate_s=rate_s,
            prompt_tokens_s=rate(now.prompt_tokens - near.prompt_tokens),
            generated_tokens_s=rate(now.generation_tokens - near.generation_tokens),
            computed_tokens_s=rate(now.computed - near.computed),
            ended_s=rate(now.ended - near.ended),
            steps_s=rate(near_steps),
            preemptions=now.preemptions - first.preemptions,
            tokens_a_step=_ratio(now.computed - first.computed, steps),
            hit_rate=_ratio(now.prefix_hits - first.prefix_hits, now.prefix_queries - first.prefix_queries),
            drafts_kept=_ratio(now.kept - first.kept, now.drafts - first.drafts),
            **spreads,
        )

    def _before(self, at: float) -> Sample:
        """Return the latest sample not after `at`; the oldest if all are later."""
        index = bisect_right(self._samples, at, key=lambda sample: sample.at)
        return self._samples[max(0, index - 1)]


def spread(histogram: Histogram, before: Sequence[int]) -> Spread:
    """Return the percentiles of the values that `histogram` has counted since its counts were `before`."""
    counts = [new - old for new, old in zip(histogram.counts, before, strict=True)]
    count = sum(counts)
    if not count:
        return Spread()
    return Spread(
        _quantile(histogram.bounds, counts, count * 0.5), _quantile(histogram.bounds, counts, count * 0.99), count
    )


def _quantile(bounds: Sequence[float], counts: Sequence[int], rank: float) -> float:
    """Return the value below which `rank` values lie, interpolated within its bucket; the last bound if above all."""
    seen, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and seen + count >= rank:
            return low + (bound - low) * (rank - seen) / count
        seen, low = seen + count, bound
    return bounds[-1]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
