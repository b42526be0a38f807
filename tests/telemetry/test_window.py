"""Percentiles and rates of the last seconds."""

from __future__ import annotations

import random
import statistics

import pytest

from infd.telemetry.metrics import LAG_S, LATENCY_S, FineHistogram, Histogram, Metrics
from infd.telemetry.window import RATE_S, WINDOW_S, Window, spread


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def passing(window: Window, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        window.sample()


@pytest.mark.parametrize("median_s", [0.00005, 0.0004, 0.012, 0.3, 9.0])
def test_percentiles_are_within_five_percent_of_the_exact_ones(median_s: float) -> None:
    draw = random.Random(3)
    values = [draw.lognormvariate(0, 0.8) * median_s for _ in range(20_000)]
    histogram = FineHistogram(LATENCY_S)
    for value in values:
        histogram.observe(value)
    exact = statistics.quantiles(values, n=100)

    found = spread(histogram, [0] * len(histogram.counts))

    assert found.p50 == pytest.approx(exact[49], rel=0.05)
    assert found.p99 == pytest.approx(exact[98], rel=0.05)
    assert found.count == 20_000


@pytest.mark.parametrize("buckets", [LATENCY_S, LAG_S])
def test_prometheus_reads_the_same_buckets_of_a_fine_histogram(buckets: tuple[float, ...]) -> None:
    draw = random.Random(4)
    coarse, fine = Histogram(buckets), FineHistogram(buckets)
    for value in [*buckets, *(draw.lognormvariate(-4, 3) for _ in range(1000)), 1e-9, 1e6]:
        coarse.observe(value, 2)
        fine.observe(value, 2)

    assert fine.cumulative() == coarse.cumulative()
    assert fine.sum == coarse.sum


def test_values_leave_the_window() -> None:
    metrics, clock = Metrics(), Clock()
    window = Window(metrics, clock)
    metrics.step.observe(1.0)
    passing(window, clock, 2)
    metrics.step.observe(0.01)
    assert window.recent().step.count == 2

    passing(window, clock, int(WINDOW_S) - 1)
    recent = window.recent()
    assert recent.step.count == 1
    assert recent.step.p99 == pytest.approx(0.01, rel=0.05)
    assert recent.window_s == WINDOW_S

    passing(window, clock, 2)
    assert window.recent().step.p50 is None


def test_rates_cover_the_last_seconds_and_include_the_present() -> None:
    metrics, clock = Metrics(), Clock()
    window = Window(metrics, clock)
    metrics.generation_tokens = 1000
    passing(window, clock, 10)
    for _ in range(5):
        metrics.generation_tokens += 20
        metrics.prefix_queries, metrics.prefix_hits = metrics.prefix_queries + 4, metrics.prefix_hits + 1
        passing(window, clock, 1)
    recent = window.recent()
    assert (recent.generated_tokens_s, recent.rate_s, recent.hit_rate) == (20.0, RATE_S, 0.25)

    metrics.generation_tokens += 50
    assert window.recent().generated_tokens_s == 30.0


def test_a_young_daemon_divides_by_its_age() -> None:
    metrics, clock = Metrics(), Clock()
    window = Window(metrics, clock)
    assert window.recent().generated_tokens_s == 0.0
    metrics.generation_tokens, clock.now = 30, clock.now + 0.5

    assert window.recent().generated_tokens_s == 60.0


def test_figures_without_a_sample_are_unknown_instead_of_zero() -> None:
    recent = Window(Metrics(), Clock()).recent()

    assert (recent.ttft.p50, recent.hit_rate, recent.tokens_a_step, recent.drafts_kept) == (None,) * 4
