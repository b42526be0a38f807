from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from msgspec import structs

from infd.loadgen.figures import Measured, Report, summarise
from infd.loadgen.plot.page import page
from infd.loadgen.plot.svg import Axis, Chart
from infd.loadgen.record import Record
from infd.loadgen.samples import Failure, Sample
from infd.loadgen.settings import Settings


def run(concurrency: int, count: int = 12, failures: int = 0) -> Report:
    samples = [
        Sample(
            due_s=0.1 * number,
            ttft_s=0.05 * concurrency,
            e2e_s=0.3,
            gaps_s=[0.1, 0.1],
            input_tokens=5,
            output_tokens=3,
            counted=True,
        )
        for number in range(count)
    ]
    failed = [Failure(kind="<http 429>", due_s=0.0, e2e_s=0.1)] * failures
    settings = Settings(url="http://h", concurrency=concurrency)
    return summarise(settings, "m", "now", Measured(duration_s=2.0, samples=samples, failures=failed))


class Page(HTMLParser):
    """Counts elements by class, and checks that all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.classes: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}
        self.classes.append(dict(attrs).get("class") or tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"h2", "h3"}:
            self.headings.append(data)


def drawn(*records: Record) -> Page:
    read = Page(page(records, [f"file {number}" for number in range(len(records))]))
    assert not read.open
    return read


def test_a_sweep_has_every_chart() -> None:
    read = drawn(Record(runs=[run(1), run(4, failures=2)]))

    assert [heading for heading in read.headings if "," not in heading] == [
        "Figures",
        "Latency against load",
        "Time to first token against load",
        "Time per output token against load",
        "Output against load",
        "Distributions",
        "Timelines",
    ]
    assert sum(", distribution" in heading for heading in read.headings) == 4
    assert sum(heading.startswith("Requests, ") for heading in read.headings) == 2
    assert read.classes.count("failed") == 2
    assert read.classes.count("writing") == 24


def test_one_load_has_no_chart_against_load() -> None:
    assert "Latency against load" not in drawn(Record(runs=[run(1)])).headings


def test_two_measurements_are_drawn_together() -> None:
    read = drawn(Record(runs=[run(1), run(4)], label="old"), Record(runs=[run(1), run(4)]))

    assert sum(heading.startswith("Requests, file 1, ") for heading in read.headings) == 2
    assert read.classes.count("line c0 dashed") == 2 + 4  # old's p99 against load, and the distributions of file 1
    assert read.classes.count("line c1 dashed") == 2 + 4


def test_runs_of_a_load_are_dots_and_lines_join_the_medians_of_loads() -> None:
    several = [run(load, count) for count in (3, 9, 6) for load in (2, 4)]
    text = page([Record(runs=several, label="A"), Record(runs=several, label="B")], ["", ""])
    output = re.search('aria-label="Output against load">.*?</figure>', text)
    assert output
    at = {  # B is drawn over A, at the same places
        load: sorted(float(y) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', output[0]) if x == load)[::2]
        for load in ("50.0", "408.0")
    }

    assert [len(heights) for heights in at.values()] == [3, 3]
    joined = " ".join(f"{x},{heights[1]}" for x, heights in at.items())
    assert re.findall(r'points="([^"]*)"', output[0]) == [joined, joined]
    assert "dots: runs; lines: their medians" in output[0]
    assert text.count("</span>A, 2 at once</span>") == 4, "once in the legend of each distribution"
    assert text.count("<summary>A, 2 at once, run 3</summary>") == 1


def test_each_limit_has_a_line_where_rates_vary_too() -> None:
    reports = [run(limit) for limit in (2, 4)]
    swept = [structs.replace(one, settings=structs.replace(one.settings, request_rate=rate))
             for one in reports for rate in (1.0, 8.0)]  # fmt: skip
    output = re.search('aria-label="Output against load">.*?</figure>', page([Record(runs=swept)], ["x"]))

    assert output
    assert re.findall("</span>([^<]+)</span>", output[0]) == ["2 at once", "4 at once"]


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    text = page([Record(runs=[run(1, failures=1)], label="<b>")], ["x"])
    read = Page(text)

    assert not read.attributes & {"src", "href", "srcset", "data", "onclick", "onload"}
    assert "script" not in read.classes
    assert not re.search(r"url\(|@import", text)
    assert "<b>" not in text and "<http 429>" not in text  # noqa: PT018
    assert "default-src 'none'" in text


def test_an_empty_run_is_drawn() -> None:
    assert "Timelines" in drawn(Record(runs=[run(1, count=0)])).headings


def test_a_timeline_of_many_requests_shows_some_and_says_so() -> None:
    text = page([Record(runs=[run(1, count=1000)])], ["x"])

    assert "300 of 1000 requests, evenly chosen" in text
    assert text.count('class="writing"') == 300


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("", 0, 100), [0, 20, 40, 60, 80, 100]),
        (Axis.over("", [3.0, 9.0]), [0, 2, 4, 6, 8]),
        (Axis.over("", [1.0, 1000.0]), [1, 3, 10, 30, 100, 300, 1000]),
        (Axis.of_loads("", [8, 1, 2, 2]), [1, 2, 8]),
    ],
)
def test_ticks_are_round_and_inside_the_axis(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)
    assert all(0 <= axis.place(tick) <= 1 for tick in axis.ticks())


def test_points_are_where_their_values_are() -> None:
    chart = Chart("t", Axis("x", 0, 10), Axis("y", 0, 4))
    chart.line([(0, 0), (10, 4)], "c0", "a")

    assert 'points="50.0,204.0 408.0,10.0"' in chart.svg()
