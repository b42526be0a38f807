from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from infd.loadgen.comparison import FIGURES, Change, Judge, compare, merged
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


JUDGE = Judge()


def change(before: list[float], after: list[float]) -> Change:
    return JUDGE.change(TTFT, before, after)


def drawn(seed: int, scale: float, spread: float, count: int = 5) -> list[float]:
    """Return the figure of `count` runs."""
    return (scale * np.random.default_rng(seed).lognormal(0.0, spread, count)).tolist()


def record(*runs: list[float], label: str = "", **fields: int) -> Record:
    return Record(label=label, runs=[report(ttft_s, Settings(url="u", **fields)) for ttft_s in runs])


def test_a_change_beyond_the_spread_between_runs_is_faster_or_slower() -> None:
    slower, faster = change(drawn(1, 1.0, 0.03), drawn(2, 1.2, 0.03)), change(drawn(1, 1.2, 0.03), drawn(2, 1.0, 0.03))

    assert (slower.verdict, faster.verdict) == ("slower", "faster")
    assert slower.ratio_spread is not None
    assert 1.05 < slower.ratio_spread[0] < slower.ratio < slower.ratio_spread[1]
    assert JUDGE.change(OUTPUT, drawn(1, 1.0, 0.03), drawn(2, 1.2, 0.03)).verdict == "faster"  # more tokens a second


def test_runs_that_differ_as_much_among_themselves_cannot_tell_however_many_requests_they_have() -> None:
    before, after = (record(*([ttft_s] * 200 for ttft_s in runs)) for runs in ((0.1, 0.12, 0.14), (0.12, 0.15, 0.16)))
    changes = {one.figure: one for one in compare(before, after, JUDGE).loads[0].changes}

    assert changes["first token p50"].verdict == "cannot tell"
    assert changes["first token p50"].before_spread == pytest.approx((100.0, 140.0))


def test_a_run_whose_chunks_arrived_together_counts_too() -> None:
    runs = [report([0.1] * 3, Settings(url="u"), gap_s) for gap_s in (0.0, 0.01, 0.012)]
    found = compare(Record(runs=runs), Record(runs=runs), JUDGE).loads[0]

    assert {one.figure: one.verdict for one in found.changes}["longest gap p50"] == "cannot tell"


def test_equal_servers_are_rarely_called_different_and_one_slower_by_a_fifth_nearly_always() -> None:
    pairs = [(drawn(2 * n, 1.0, 0.03), drawn(2 * n + 1, 1.0, 0.03)) for n in range(100)]
    alike = [change(before, after).verdict for before, after in pairs]
    slower = [change(before, [1.2 * value for value in after]).verdict for before, after in pairs]
    without_margin = [Judge(margin=0.0).change(TTFT, before, after).verdict for before, after in pairs]

    assert {*alike} == {"no difference", "cannot tell"}
    assert slower.count("slower") > 90
    assert 96 <= without_margin.count("cannot tell") <= 100  # 99 expected


def test_the_spread_of_a_ratio_covers_the_true_ratio_as_often_as_it_says() -> None:
    judge = Judge(confidence=0.9)
    spreads = [
        judge.change(TTFT, drawn(2 * n, 1.0, 0.1), drawn(2 * n + 1, 1.5, 0.1, count=3)).ratio_spread for n in range(150)
    ]

    assert sum(spread is not None and spread[0] < 1.5 < spread[1] for spread in spreads) / 150 == pytest.approx(
        0.9, abs=0.06
    )


def test_no_difference_needs_as_much_certainty_that_the_change_is_within_the_margin() -> None:
    quiet, noisy = (
        [change(drawn(2 * n, 1.0, spread), drawn(2 * n + 1, 1.0, spread)).verdict for n in range(50)]
        for spread in (0.005, 0.1)
    )
    beyond = [change(drawn(2 * n, 1.0, 0.02), drawn(2 * n + 1, 1.06, 0.02)).verdict for n in range(100)]

    assert quiet.count("no difference") == 50
    assert noisy.count("cannot tell") == 50
    assert beyond.count("no difference") <= 1, "99 % confidence"
    assert set(beyond) <= {"cannot tell", "slower", "no difference"}


def test_a_change_within_the_margin_is_none_however_certain() -> None:
    same, little, more = (change([1.0] * 3, [value] * 3) for value in (1.0, 1.04, 1.06))

    assert [(one.verdict, one.confidence) for one in (same, little)] == [("no difference", 0.0)] * 2
    assert (more.verdict, more.confidence) == ("slower", 1.0)


def test_two_runs_allow_no_verdict() -> None:
    few = change([1.0, 1.0, 1.0], [9.0, 9.0])

    assert (few.verdict, few.ratio, few.ratio_spread) == ("too few runs", pytest.approx(9.0), None)


def test_files_of_one_side_are_one_measurement_and_equal_loads_are_compared() -> None:
    before = merged([record([0.1] * 8, concurrency=1), record([0.1] * 9, concurrency=1, seed=7, label="old")], "a")
    after = merged([Record(runs=[*record([0.1] * 8, concurrency=1).runs, *record([0.1] * 8).runs])], "b,c")
    compared = compare(before, after, JUDGE)

    assert (compared.before, compared.after, compared.alone) == ("old", "b,c", ["8 at once"])
    (load,) = compared.loads
    assert (load.load, load.before_runs, load.after_runs) == ("1 at once", 2, 1)
    assert (load.before_requests, load.after_requests) == (17, 8)
    assert compared.different == {}


def test_a_figure_that_no_request_has_is_left_out() -> None:
    single = Sample(ttft_s=0.1, e2e_s=0.1, gaps_s=[], input_tokens=5, output_tokens=1, counted=True)
    runs = [summarise(Settings(url="u"), "m", "now", Measured(duration_s=1.0, samples=[single]))] * 3
    changes = compare(Record(runs=runs), Record(runs=runs), JUDGE).loads[0].changes

    assert {one.figure.rpartition(" ")[0] or one.figure for one in changes} == {"output", "first token", "end to end"}


def test_other_settings_are_named() -> None:
    one = Settings(url="u", body={"temperature": 0})
    other = structs.replace(one, body={}, url="v", seed=9)
    compared = compare(Record(runs=[report([0.1], one)]), Record(runs=[report([0.1], other)]), JUDGE)

    assert compared.different == {"body": ({"temperature": 0}, {})}


def test_rates_over_time_have_all_tokens() -> None:
    run = report([0.5, 0.5], Settings(url="u"), gap_s=0.15)  # tokens at 0.5, 0.65, 0.8, 0.95 and a second later

    assert output_rates(run, 4) == [0.0, 8.0, 0.0, 8.0]
