from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from infd.loadgen.comparison import FIGURES, Change, change, compare
from infd.loadgen.figures import Measured, Report, summarise
from infd.loadgen.record import Record
from infd.loadgen.samples import Sample
from infd.loadgen.settings import Settings
from infd.loadgen.timeslices import output_rates

TTFT = next(figure for figure in FIGURES if figure.name == "first token p50")
OUTPUT = next(figure for figure in FIGURES if figure.more_is_better)


def report(ttft_s: list[float], settings: Settings, gap_s: float = 0.01) -> Report:
    samples = [
        Sample(
            due_s=number,
            ttft_s=ttft,
            e2e_s=ttft + 3 * gap_s,
            gaps_s=[gap_s] * 3,
            input_tokens=5,
            output_tokens=4,
            counted=True,
        )
        for number, ttft in enumerate(ttft_s)
    ]
    return summarise(settings, "m", "now", Measured(duration_s=float(len(ttft_s)), samples=samples))


def drawn(seed: int, scale: float, count: int = 40) -> list[float]:
    return (scale * np.random.default_rng(seed).lognormal(0.0, 0.3, count)).tolist()


def changes(before: list[float], after: list[float]) -> dict[str, Change]:
    settings = Settings(url="u")
    compared = compare(
        Record(runs=[report(before, settings)]), Record(runs=[report(after, settings)]), ("a", "b"), 0.99
    )
    return {one.figure: one for one in compared.loads[0].changes}


def test_a_change_beyond_chance_is_faster_or_slower() -> None:
    slower, faster = change(TTFT, drawn(1, 1.0), drawn(2, 1.6), 0.99), change(TTFT, drawn(1, 1.6), drawn(2, 1.0), 0.99)

    assert (slower.verdict, faster.verdict) == ("slower", "faster")
    assert slower.ratio_spread[0] < slower.ratio < slower.ratio_spread[1]
    assert slower.ratio_spread[0] > 1 > faster.ratio_spread[1]
    assert change(OUTPUT, drawn(1, 1.0), drawn(2, 1.6), 0.99).verdict == "faster"  # more tokens a second


@pytest.mark.exhaustive
def test_equal_distributions_are_rarely_called_different() -> None:
    verdicts = [change(TTFT, drawn(2 * n, 1.0), drawn(2 * n + 1, 1.0), 0.95).verdict for n in range(60)]

    assert verdicts.count("no difference") >= 54  # 57 expected


def test_a_spread_is_that_of_the_mean_in_theory() -> None:
    values = np.random.default_rng(0).normal(10, 1, 400)
    spread = change(OUTPUT, values.tolist(), values.tolist(), 0.95).before_spread

    assert (spread[1] - spread[0]) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_equal_values_differ_with_no_confidence() -> None:
    same = change(TTFT, [1.0] * 20, [1.0] * 20, 0.99)

    assert (same.ratio, same.confidence, same.verdict) == (1.0, 0.0, "no difference")


def test_few_requests_allow_no_statement_and_tails_need_a_hundred() -> None:
    few, some = changes([0.1] * 7, [0.9] * 7), changes([0.1] * 99, [0.9] * 99)
    many = changes([0.1] * 100, [0.9] * 100)

    assert few["first token p50"].verdict == "too few"
    assert [some[f"first token {q}"].verdict for q in ("p50", "p99")] == ["slower", "too few"]
    assert many["first token p99"].verdict == "slower"
    assert many["first token p99"].before == pytest.approx(100)


def test_equal_loads_are_compared_and_repeats_pooled() -> None:
    light, heavy = Settings(url="u", concurrency=1), Settings(url="u", concurrency=8)
    before = Record(runs=[report([0.1] * 8, light), report([0.1] * 9, light)], label="old")
    after = Record(runs=[report([0.1] * 8, light), report([0.1] * 8, heavy)])
    compared = compare(before, after, ("a", "b"), 0.99)

    assert (compared.before, compared.after, compared.alone) == ("old", "b", ["8 at once"])
    assert [(load.load, load.before_requests, load.after_requests) for load in compared.loads] == [("1 at once", 17, 8)]
    assert compared.different == {}


def test_other_settings_are_named() -> None:
    one = Settings(url="u", body={"temperature": 0})
    other = structs.replace(one, body={}, url="v", seed=9)
    compared = compare(Record(runs=[report([0.1], one)]), Record(runs=[report([0.1], other)]), ("a", "b"), 0.99)

    assert compared.different == {"body": ({"temperature": 0}, {})}


def test_rates_over_time_have_all_tokens() -> None:
    run = report([0.5, 0.5], Settings(url="u"), gap_s=0.15)  # tokens at 0.5, 0.65, 0.8, 0.95 and a second later

    assert output_rates(run, 4) == [0.0, 8.0, 0.0, 8.0]
