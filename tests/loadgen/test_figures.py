from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.loadgen.figures import Measured, percentile, spread, summarise
from infd.loadgen.samples import Failure, Sample
from infd.loadgen.settings import Settings


def sample(*, ttft_s: float, gaps_s: list[float], output_tokens: int, counted: bool = True) -> Sample:
    return Sample(
        ttft_s=ttft_s,
        e2e_s=ttft_s + sum(gaps_s),
        gaps_s=gaps_s,
        input_tokens=10,
        output_tokens=output_tokens,
        counted=counted,
    )


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)))


def test_an_empty_sample_has_no_percentiles() -> None:
    assert spread([]) is None


def test_figures_of_a_known_run() -> None:
    samples = [
        sample(ttft_s=0.1, gaps_s=[0.01, 0.03], output_tokens=3),
        sample(ttft_s=0.3, gaps_s=[0.02, 0.02], output_tokens=5),  # two chunks had two tokens each
    ]
    failures = [Failure(kind="timeout", due_s=0.0, e2e_s=1.0)]
    measured = Measured(duration_s=2.0, samples=samples, failures=failures)
    report = summarise(Settings(url="u"), "m", "now", measured)

    assert report.requests.completed == 2
    assert report.requests.failed == 1
    assert (report.tokens.input, report.tokens.output, report.tokens.counted) == (20, 8, "server")
    assert (report.throughput.requests_s, report.throughput.output_tokens_s) == (1.0, 4.0)
    assert report.throughput.total_tokens_s == 14.0
    latency = report.latency_ms
    assert latency.ttft is not None
    assert latency.inter_token is not None
    assert latency.per_token is not None
    assert latency.e2e is not None
    assert (latency.ttft.mean, latency.ttft.p50, latency.ttft.max) == pytest.approx((200, 200, 300))
    assert (latency.inter_token.p50, latency.inter_token.max) == pytest.approx((20, 30))
    assert (latency.per_token.p50, latency.per_token.max) == pytest.approx((15, 20))
    assert latency.e2e.max == pytest.approx(340)


def test_one_answer_without_usage_makes_the_count_the_clients() -> None:
    samples = [
        sample(ttft_s=0.1, gaps_s=[], output_tokens=1),
        sample(ttft_s=0.1, gaps_s=[], output_tokens=1, counted=False),
    ]
    assert (
        summarise(Settings(url="u"), "m", "now", Measured(duration_s=1.0, samples=samples)).tokens.counted == "client"
    )
