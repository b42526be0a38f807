"""Compare two measurements: the change of each figure, its spread between runs, and whether it is more than chance.

The unit is a run: the other work of the machine affects all requests of a run alike, so the spread of requests within a
run says little about the next run; by it, most figures of one server measured twice would "differ". A change is
"faster" or "slower" if the runs' figures, as logarithms, differ by more than a margin in a t-test with pooled variance;
there is "no difference" if the change is within that margin with the same confidence, and else the runs "cannot tell".
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct, structs

from infd.loadgen import student
from infd.loadgen.figures import percentile
from infd.loadgen.sweep import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from infd.loadgen.figures import Report
    from infd.loadgen.record import Record
    from infd.loadgen.samples import Sample

FEWEST: Final = 3  # runs of each measurement that a spread needs

# Chunks that arrive together have a gap of 0, of which there is no logarithm; files of runs keep whole microseconds.
RESOLUTION_MS: Final = 0.001

Verdict = Literal["faster", "slower", "no difference", "cannot tell", "too few runs"]


class Figure(Struct, frozen=True):
    """A figure of a run; `of` returns None if the run has no value for it."""

    name: str
    unit: str
    of: Callable[[Report], float | None]
    more_is_better: bool = False


def _latency(value: Callable[[Sample], float | None], q: int) -> Callable[[Report], float | None]:
    def of(report: Report) -> float | None:
        found = sorted(1000 * one for sample in report.samples if (one := value(sample)) is not None)
        return max(percentile(found, q), RESOLUTION_MS) if found else None

    return of


_LATENCIES: Final[dict[str, Callable[[Sample], float | None]]] = {
    "first token": lambda sample: sample.ttft_s,
    "per token": lambda sample: sample.per_token_s,
    "longest gap": lambda sample: max(sample.gaps_s, default=None),
    "end to end": lambda sample: sample.e2e_s,
}

FIGURES: Final = (
    Figure("output", "tok/s", lambda report: report.throughput.output_tokens_s, more_is_better=True),
    *(Figure(f"{name} p{q}", "ms", _latency(value, q)) for name, value in _LATENCIES.items() for q in (50, 99)),
)


class Change(Struct, frozen=True, kw_only=True):
    """The change of one figure.

    before, after  geometric means of the runs' figures; `*_spread`: the least and the greatest
    ratio          after / before; `ratio_spread`: its confidence interval, None with too few runs
    confidence     greatest confidence with which the change exceeds the comparison's margin
    verdict        "faster" or "slower" if that is at least the comparison's; "no difference" if `ratio_spread` is
                   within the margin; "cannot tell" if neither: more runs may
    """

    figure: str
    unit: str
    before: float
    after: float
    before_spread: tuple[float, float]
    after_spread: tuple[float, float]
    ratio: float
    ratio_spread: tuple[float, float] | None
    confidence: float
    verdict: Verdict


class Load(Struct, frozen=True, kw_only=True):
    """The changes at one load, and the numbers of runs and completed requests from which they follow."""

    load: str
    before_runs: int
    after_runs: int
    before_requests: int
    after_requests: int
    changes: list[Change]


class Judge(Struct, frozen=True):
    """The criteria of a verdict.

    confidence  probability that figures whose true difference is within `margin` are not called different
    margin      relative change that is never called different: the machine's drift between two measurements
    """

    confidence: float = 0.99
    margin: float = 0.05

    def change(self, figure: Figure, before: Sequence[float], after: Sequence[float]) -> Change:
        """Return how a figure changed, from its value in each run; all are positive, and neither side is empty."""
        old, new = ([math.log(value) for value in values] for values in (before, after))
        shift = fmean(new) - fmean(old)
        spread, certain = None, 0.0
        verdict: Verdict = "too few runs"
        if min(len(old), len(new)) >= FEWEST:
            freedom, error = _error(old, new)
            reach = student.quantile(self.confidence, freedom) * error
            spread = math.exp(shift - reach), math.exp(shift + reach)
            certain = _certain(abs(shift) - math.log1p(self.margin), error, freedom)
            better: Verdict = "faster" if (shift > 0) == figure.more_is_better else "slower"
            alike = abs(shift) + reach <= math.log1p(self.margin)
            verdict = better if certain >= self.confidence else "no difference" if alike else "cannot tell"
        return Change(
            figure=figure.name,
            unit=figure.unit,
            before=math.exp(fmean(old)),
            after=math.exp(fmean(new)),
            before_spread=(min(before), max(before)),
            after_spread=(min(after), max(after)),
            ratio=math.exp(shift),
            ratio_spread=spread,
            confidence=certain,
            verdict=verdict,
        )


def _error(old: Sequence[float], new: Sequence[float]) -> tuple[int, float]:
    """Return the degrees of freedom and the standard error of the difference of two means."""
    freedom = len(old) + len(new) - 2
    squares = sum((value - fmean(values)) ** 2 for values in (old, new) for value in values)
    return freedom, math.sqrt(squares / freedom * (1 / len(old) + 1 / len(new)))


def _certain(beyond: float, error: float, freedom: int) -> float:
    """Return the confidence with which a change exceeds the margin. beyond: how far it does, as a logarithm."""
    if beyond <= 0:
        return 0.0
    return student.within(beyond / error if error else math.inf, freedom)


class Comparison(Struct, frozen=True, kw_only=True):
    """Two measurements.

    alone      loads of only one of the two
    different  settings that differ, with both values: they may be the cause of changes
    """

    before: str
    after: str
    judge: Judge
    loads: list[Load]
    alone: list[str]
    different: dict[str, tuple[Any, Any]]


def merged(records: Sequence[Record], name: str) -> Record:
    """Return several files of one measurement as one; `name` if none has a label."""
    label = next((record.label for record in records if record.label), name)
    return structs.replace(records[0], label=label, runs=[run for record in records for run in record.runs])


def compare(before: Record, after: Record, judge: Judge) -> Comparison:
    """Compare the loads that both measurements have."""
    first, second = _by_load(before.runs), _by_load(after.runs)
    shared = [load for load in first if load in second]
    return Comparison(
        before=before.label,
        after=after.label,
        judge=judge,
        loads=[
            Load(
                load=load,
                before_runs=len(first[load]),
                after_runs=len(second[load]),
                before_requests=sum(len(report.samples) for report in first[load]),
                after_requests=sum(len(report.samples) for report in second[load]),
                changes=list(_changes(first[load], second[load], judge)),
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


def _changes(before: Sequence[Report], after: Sequence[Report], judge: Judge) -> Iterator[Change]:
    for figure in FIGURES:
        old, new = ([value for report in reports if (value := figure.of(report))] for reports in (before, after))
        if old and new:
            yield judge.change(figure, old, new)


_COMPARED = (
    "endpoint",
    "task",
    "inputs",
    "requests",
    "burstiness",
    "dataset",
    "models",
    "assignment",
    "warmup",
    "exact",
    "body",
)


def _different(before: Report, after: Report) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (getattr(before.settings, name), getattr(after.settings, name)) for name in _COMPARED}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
