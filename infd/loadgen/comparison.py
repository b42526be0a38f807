"""Compare two measurements: the change of each figure, its spread, and whether it is more than chance.

Spreads are bootstrapped: requests (for rates: slices of time) are drawn with replacement from those measured, and the
figure is computed anew. They tell how much a figure varies within a measurement, not from one day to the next: a load
that is measured several times (--concurrency 8,8,8) is compared with all its requests together.
Source: Efron and Tibshirani 1993, percentile intervals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from infd.loadgen.sweep import name_of
from infd.loadgen.timeslices import output_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from infd.loadgen.figures import Report
    from infd.loadgen.record import Record
    from infd.loadgen.samples import Sample

    Floats = NDArray[np.float64]

DRAWS: Final = 4000
SLICES: Final = 20
_FEWEST: Final = 8  # values from which a median's spread can be drawn
_FEWEST_TAIL: Final = 100  # values from which the 99th percentile's can
_CHUNK: Final = 1 << 20  # values drawn at once

Verdict = Literal["faster", "slower", "no difference", "too few"]


class Figure(Struct, frozen=True):
    """A figure of a run: percentile `q` of its values, or their mean if `q` is None."""

    name: str
    unit: str
    q: float | None
    values: Callable[[Report], list[float]]
    fewest: int = _FEWEST
    more_is_better: bool = False


def _of_requests(value: Callable[[Sample], float | None]) -> Callable[[Report], list[float]]:
    return lambda report: [1000 * found for sample in report.samples if (found := value(sample)) is not None]


_LATENCIES: Final[dict[str, Callable[[Sample], float | None]]] = {
    "first token": lambda sample: sample.ttft_s,
    "per token": lambda sample: sample.per_token_s,
    "longest gap": lambda sample: max(sample.gaps_s, default=None),
    "end to end": lambda sample: sample.e2e_s,
}

FIGURES: Final = (
    Figure("output", "tok/s", None, lambda report: output_rates(report, SLICES), SLICES, more_is_better=True),
    *(
        Figure(f"{name} p{q}", "ms", q, _of_requests(value), fewest)
        for name, value in _LATENCIES.items()
        for q, fewest in ((50, _FEWEST), (99, _FEWEST_TAIL))
    ),
)


class Change(Struct, frozen=True, kw_only=True):
    """How one figure changed.

    before, after  the figure; `*_spread`: where it is with the comparison's confidence
    ratio          after / before; `ratio_spread` likewise
    confidence     largest confidence with which the ratio is not 1
    verdict        "faster" or "slower" if that is at least the comparison's; "too few": values for such a statement
    """

    figure: str
    unit: str
    before: float
    after: float
    before_spread: tuple[float, float]
    after_spread: tuple[float, float]
    ratio: float
    ratio_spread: tuple[float, float]
    confidence: float
    verdict: Verdict


class Load(Struct, frozen=True):
    """The changes at one load, and the completed requests they are of."""

    load: str
    before_requests: int
    after_requests: int
    changes: list[Change]


class Comparison(Struct, frozen=True, kw_only=True):
    """Two measurements.

    alone      loads that one of the two alone has
    different  settings that differ, with both values: figures may differ because of them
    """

    before: str
    after: str
    confidence: float
    loads: list[Load]
    alone: list[str]
    different: dict[str, tuple[Any, Any]]


def compare(before: Record, after: Record, names: tuple[str, str], confidence: float) -> Comparison:
    """Compare the loads that both measurements have. `names`: of measurements without a label."""
    first, second = _by_load(before.runs), _by_load(after.runs)
    shared = [load for load in first if load in second]
    return Comparison(
        before=before.label or names[0],
        after=after.label or names[1],
        confidence=confidence,
        loads=[
            Load(
                load,
                sum(len(report.samples) for report in first[load]),
                sum(len(report.samples) for report in second[load]),
                list(_changes(first[load], second[load], confidence)),
            )
            for load in shared
        ],
        alone=[load for load in (*first, *second) if load not in shared],
        different=_different(before.runs[0], after.runs[0]) if before.runs and after.runs else {},
    )


def _by_load(reports: Iterable[Report]) -> dict[str, list[Report]]:
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(name_of(report.settings), []).append(report)
    return found


def _changes(before: Sequence[Report], after: Sequence[Report], confidence: float) -> Iterable[Change]:
    for figure in FIGURES:
        pair = [[value for report in reports for value in figure.values(report)] for reports in (before, after)]
        if all(pair):
            yield change(figure, pair[0], pair[1], confidence)


def change(figure: Figure, before: Sequence[float], after: Sequence[float], confidence: float) -> Change:
    """Return how a figure of the values changed; neither may be empty."""
    import numpy as np  # imported here: the command line starts without it

    rng = np.random.default_rng(0)
    old, new = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    drawn_old, drawn_new = (_drawn(rng, values, figure.q) for values in (old, new))
    was, now = (float(_figure(values[None], figure.q)[0]) for values in (old, new))
    ratios = np.divide(drawn_new, drawn_old, out=np.full(DRAWS, np.inf), where=drawn_old > 0)
    below, above = float(np.mean(ratios <= 1)), float(np.mean(ratios >= 1))
    certain = min(max(0.0, 1 - 2 * min(below, above)), 1 - 1 / DRAWS)
    ratio = now / was if was > 0 else float("inf")
    return Change(
        figure=figure.name,
        unit=figure.unit,
        before=was,
        after=now,
        before_spread=_middle(drawn_old, confidence),
        after_spread=_middle(drawn_new, confidence),
        ratio=ratio,
        ratio_spread=_middle(ratios, confidence),
        confidence=certain,
        verdict=_verdict(figure, min(len(old), len(new)), ratio, certain, confidence),
    )


def _verdict(figure: Figure, values: int, ratio: float, certain: float, confidence: float) -> Verdict:
    if values < figure.fewest:
        return "too few"
    if certain < confidence:
        return "no difference"
    return "faster" if (ratio > 1) == figure.more_is_better else "slower"


def _drawn(rng: np.random.Generator, values: Floats, q: float | None) -> Floats:
    """Return the figure of DRAWS samples drawn with replacement."""
    import numpy as np

    rows = max(1, _CHUNK // len(values))
    parts = [
        _figure(values[rng.integers(0, len(values), (min(rows, DRAWS - start), len(values)))], q)
        for start in range(0, DRAWS, rows)
    ]
    return np.concatenate(parts)


def _figure(rows: Floats, q: float | None) -> Floats:
    import numpy as np

    return rows.mean(axis=1) if q is None else np.asarray(np.percentile(rows, q, axis=1))


def _middle(drawn: Floats, confidence: float) -> tuple[float, float]:
    import numpy as np

    tail = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail], method="nearest")
    return float(low), float(high)


_COMPARED = ("endpoint", "requests", "burstiness", "dataset", "models", "assignment", "warmup", "exact", "body")


def _different(before: Report, after: Report) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (getattr(before.settings, name), getattr(after.settings, name)) for name in _COMPARED}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
