"""The charts of a page: latency against load, distributions, and each run's timeline."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from infd.loadgen.figures import percentile
from infd.loadgen.plot.svg import Axis, Chart, short
from infd.loadgen.samples import Failure, Sample
from infd.loadgen.sweep import name_of
from infd.loadgen.timeslices import output_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.loadgen.figures import Report, Spread

COLOURS: Final = 8  # classes c0, c1, ... of the page's style
_POINTS: Final = 200  # of a distribution's curve
_ROWS: Final = 300  # requests that a timeline shows
_SLICES: Final = 60  # of the rate over a run's time


class Named(Struct, frozen=True):
    """A run.

    measurement  name of its measurement; "": the page has one measurement only
    number       number among the measurement's runs of the load, from 1; 0: the only one
    """

    measurement: str
    report: Report
    number: int = 0

    @property
    def load(self) -> str:
        """Measurement and load: a name that runs share."""
        return ", ".join(filter(None, (self.measurement, name_of(self.report.settings))))

    @property
    def name(self) -> str:
        """Measurement, load and number: a name of this run alone."""
        return f"{self.load}, run {self.number}" if self.number else self.load

    @classmethod
    def all_of(cls, measurement: str, reports: Sequence[Report]) -> list[Named]:
        """Return a measurement's runs, numbered where a load has several."""
        of_load = Counter(name_of(report.settings) for report in reports)
        named: Counter[str] = Counter()
        runs = []
        for report in reports:
            load = name_of(report.settings)
            named[load] += 1
            runs.append(cls(measurement, report, named[load] if of_load[load] > 1 else 0))
        return runs


class Drawn(Struct, frozen=True):
    """A chart with its heading, a note beneath, and the entries of its legend: class and name."""

    heading: str
    svg: str
    legend: list[tuple[str, str]]
    note: str = ""


def loads(runs: Sequence[Named]) -> Iterator[Drawn]:
    """Yield latencies and throughput against the load, if a measurement has several loads.

    Each run is a dot; lines join the loads' medians. If the rate and the limit of requests in flight both vary, each
    limit has a line of its own.
    """
    axis = _load_axis(runs)
    if axis is None:
        return
    label, field = axis
    placed = [(run, float(x)) for run in runs if (x := getattr(run.report.settings, field)) is not None]
    others = [name_of(structs.replace(run.report.settings, **{field: None})) for run, _ in placed]
    lines: dict[str, list[tuple[Named, float]]] = {}
    for (run, x), other in zip(placed, others, strict=True):
        apart = other if len(set(others)) > 1 else ""
        lines.setdefault(", ".join(filter(None, (run.measurement, apart))), []).append((run, x))
    figures: dict[str, tuple[str, dict[str, Callable[[Report], float | None]]]] = {
        "Time to first token": ("ms", {q: _quantile("ttft", q) for q in ("p50", "p99")}),
        "Time per output token": ("ms", {q: _quantile("per_token", q) for q in ("p50", "p99")}),
        "Output": ("tokens / s", {"": lambda report: report.throughput.output_tokens_s}),
    }
    several = any(run.number for run in runs)
    for heading, (unit, curves) in figures.items():
        series = []
        for number, (name, own) in enumerate(lines.items()):
            for dashed, (curve, of) in enumerate(curves.items()):
                points = sorted((x, y) for run, x in own if (y := of(run.report)) is not None)
                style = f"c{number % COLOURS}" + (" dashed" if dashed else "")
                if points:
                    series.append((points, style, " ".join(filter(None, (name, curve))) or "all requests"))
        if series:
            every = [point for points, _, _ in series for point in points]
            across = Axis.of_loads(label, (point[0] for point in every))
            chart = Chart(f"{heading} against load", across, Axis.over(unit, (point[1] for point in every)))
            for points, style, name in series:
                chart.line(_medians(points), style, name)
                chart.dots(points, style, name)
            note = "dots: runs; lines: their medians" if several else ""
            yield Drawn(f"{heading} against load", chart.svg(), [(style, name) for _, style, name in series], note)


def _medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    heights: dict[float, list[float]] = {}
    for x, y in points:
        heights.setdefault(x, []).append(y)
    return [(x, median(heights[x])) for x in sorted(heights)]


def distributions(runs: Sequence[Named]) -> Iterator[Drawn]:
    """Yield the cumulative distribution of each latency, a curve for each run.

    Colours tell loads apart, dashes the second measurement.
    """
    values: dict[str, Callable[[Report], list[float]]] = {
        "Time to first token": lambda report: [sample.ttft_s for sample in report.samples],
        "Time between tokens": lambda report: [gap for sample in report.samples for gap in sample.gaps_s],
        "Time per output token": lambda report: [
            found for sample in report.samples if (found := sample.per_token_s) is not None
        ],
        "End to end": lambda report: [sample.e2e_s for sample in report.samples],
    }
    colours = list(dict.fromkeys(name_of(run.report.settings) for run in runs))
    measurements = list(dict.fromkeys(run.measurement for run in runs))
    for heading, of in values.items():
        series = []
        for run in runs:
            ordered = sorted(1000 * value for value in of(run.report))
            if ordered:
                quantiles = [100 * step / _POINTS for step in range(_POINTS + 1)]
                points = [(percentile(ordered, q), q) for q in quantiles]
                colour = colours.index(name_of(run.report.settings)) % COLOURS
                dashed = " dashed" if measurements.index(run.measurement) % 2 else ""
                series.append((points, f"c{colour}{dashed}", run))
        if series:
            x = Axis.over("ms", (point[0] for points, _, _ in series for point in points))
            chart = Chart(f"{heading}, distribution", x, Axis("% of values", 0, 100))
            for points, style, run in series:
                chart.line(points, style, run.name)
            legend = list(dict.fromkeys((style, run.load) for _, style, run in series))
            yield Drawn(f"{heading}, distribution", chart.svg(), legend)


def timeline(run: Named) -> Iterator[Drawn]:
    """Yield the requests of a run as bars over its time, and its output rate."""
    report = run.report
    requests: list[Sample | Failure] = [*report.samples, *report.failures]
    requests.sort(key=lambda request: request.due_s)
    shown = [requests[number] for number in _spaced(len(requests), _ROWS)]
    time = Axis("seconds", 0.0, max(report.duration_s, 1e-6))
    if shown:
        height = 46 + round(min(8.0, max(1.2, 200 / len(shown))) * len(shown))
        chart = Chart(f"Requests, {run.name}", time, Axis("requests", len(shown), 0), height=height, y_ticks=False)
        for row, request in enumerate(shown):
            begin, place = request.due_s, (row + 0.05, row + 0.95)
            end = begin + request.e2e_s
            if isinstance(request, Failure):
                chart.bar((begin, end), place, "failed", f"{request.kind} after {short(request.e2e_s)} s")
                continue
            first, sent = begin + request.ttft_s, begin + request.queued_s
            tokens = f"{request.input_tokens} in, {request.output_tokens} out"
            told = f"{tokens}: first token {short(1000 * request.ttft_s)} ms, end {short(1000 * request.e2e_s)} ms"
            if sent - begin > time.high / 1000:
                chart.bar((begin, sent), place, "held", told)
            chart.bar((sent, first), place, "waiting", told)
            chart.bar((first, end), place, "writing", told)
        held = any(sample.queued_s > time.high / 1000 for sample in report.samples)
        legend = [("held", "held back by the limit in flight")] if held else []
        legend += [("waiting", "until the first token"), ("writing", "until the last")]
        legend += [("failed", "failed")] if report.failures else []
        note = "" if len(shown) == len(requests) else f"{len(shown)} of {len(requests)} requests, evenly chosen"
        yield Drawn(f"Requests, {run.name}", chart.svg(), legend, note)
    if report.samples:
        rates = output_rates(report, _SLICES)
        width = report.duration_s / _SLICES
        rate = Chart(f"Output, {run.name}", time, Axis("tokens / s", 0.0, 1.05 * max(rates) or 1.0))
        rate.line([((number + 0.5) * width, value) for number, value in enumerate(rates)], "c0", "output tokens / s")
        yield Drawn(f"Output over time, {run.name}", rate.svg(), [])


def _load_axis(runs: Sequence[Named]) -> tuple[str, str] | None:
    """Return the label and the name of the field of Settings that varies between the loads; None if none varies."""
    for label, field in (("requests / s", "request_rate"), ("requests in flight", "concurrency")):
        if len({getattr(run.report.settings, field) for run in runs} - {None}) > 1:
            return label, field
    return None


def _quantile(latency: str, q: str) -> Callable[[Report], float | None]:
    def of(report: Report) -> float | None:
        spread: Spread | None = getattr(report.latency_ms, latency)
        return getattr(spread, q) if spread is not None else None

    return of


def _spaced(count: int, most: int) -> list[int]:
    step = max(1.0, count / most)
    return [math.floor(number * step) for number in range(min(count, most))]
