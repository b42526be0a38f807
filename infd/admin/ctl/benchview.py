"""Tables of measurements: one run in full, a sweep with one row for each load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct, structs

from infd.admin.ctl import show as output
from infd.loadgen.sweep import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.loadgen.comparison import Change, Comparison
    from infd.loadgen.figures import Report, Spread

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_LENGTHS = {
    "ids": "token ids, of exact lengths",
    "tokenize": "texts, counted by the server's tokenizer",
    "probes": "texts of about the lengths: the server has no /tokenize",
}

_OPTIONS = {
    "path": "--dataset-path",
    "shape": "--dataset",
    "input_range": "--range-ratio (input)",
    "output_range": "--range-ratio (output)",
    "assignment": "--lora-assignment",
    "models": "--lora-modules",
}


def show(reports: Sequence[Report]) -> None:
    """Print one report in full, or several as a table."""
    if len(reports) == 1:
        _one(reports[0])
    else:
        _sweep(reports)


def _one(report: Report) -> None:
    output.table((), list(_facts(report)))
    click.echo()
    latency = report.latency_ms
    generating = {
        "first token": latency.ttft,
        "between tokens": latency.inter_token,
        "per output token": latency.per_token,
    }
    _spreads("TIMES IN MS", {**(generating if report.settings.task == "generate" else {}), "end to end": latency.e2e})
    if report.models:
        click.echo()
        output.table(
            ("MODEL", "DONE", "FAILED", "TOKENS", "TTFT P50 MS", "TTFT P99 MS", "TPOT P50 MS"),
            [
                (
                    name,
                    str(one.completed),
                    str(one.failed),
                    str(one.output_tokens),
                    _number(one.ttft_ms, "p50"),
                    _number(one.ttft_ms, "p99"),
                    _number(one.per_token_ms, "p50"),
                )
                for name, one in report.models.items()
            ],
            right=("DONE", "FAILED", "TOKENS", "TTFT P50 MS", "TTFT P99 MS", "TPOT P50 MS"),
        )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    done, rate, tokens = report.requests, report.throughput, report.tokens
    early = f", {done.unfinished} unfinished, interrupted" if report.interrupted else ""
    yield "requests", f"{done.completed} done, {done.failed} failed{early} in {report.duration_s:.1f} s"
    yield from ((f"  {kind}", str(count)) for kind, count in done.errors.items())
    note = "" if tokens.counted == "server" else " (pieces of text: the server reports no usage)"
    cached = f", {tokens.cached} of the input cached" if tokens.cached else ""
    generates = report.settings.task == "generate"
    out = f", {tokens.output} out" if generates else f"; {report.settings.inputs} inputs a request"
    yield "tokens", f"{tokens.input} in{out}{cached}{note}"
    if report.lengths is not None:
        off = f"; {report.inexact} of them some tokens off" if report.inexact else ""
        yield "prompts", f"{_LENGTHS[report.lengths]}{off}; seed {report.settings.seed}"
    if generates:
        yield "sampling", _sampling(report)
    yield "requests/s", f"{rate.requests_s:.2f}, at most {report.peak_in_flight} in flight"
    yield "input tok/s", f"{rate.input_tokens_s:.1f}"
    if generates:
        yield "output tok/s", f"{rate.output_tokens_s:.1f}"
        yield "total tok/s", f"{rate.total_tokens_s:.1f}"
    else:
        yield "inputs/s", f"{rate.requests_s * report.settings.inputs:.2f}"
    if (good := report.goodput) is not None:
        asked = ", ".join(f"{name} {limit:g} ms" for name, limit in good.objectives_ms.items())
        yield "goodput", f"{good.requests_s:.2f} requests/s, {good.share:.1%} of requests ({asked})"
        yield from ((f"  missed {name}", str(count)) for name, count in good.missed.items())
    if (drafts := report.drafts) is not None:
        kept = f"{drafts.acceptance:.1%} of {drafts.drafted_tokens} drafted tokens accepted"
        yield "drafts", f"{kept}, {drafts.step_tokens:.2f} tokens a step"
        places = " ".join(f"{share:.0%}" for share in drafts.by_position)
        yield "  by position", places
    if (judged := report.structured) is not None:
        only = "" if judged.checked == "schema" else " (JSON alone: jsonschema is not installed)"
        yield (
            "schema",
            f"{judged.valid} answers fit{only}, {judged.invalid} do not, {judged.cut} were cut by their length",
        )


def _sampling(report: Report) -> str:
    given = ", ".join(f"{name} {value}" for name, value in report.sampling.items())
    return f"{given}; else the server's defaults" if given else "the server's defaults"


def _spreads(title: str, rows: dict[str, Spread | None]) -> None:
    head = tuple(map(str.upper, _COLUMNS))
    output.table(
        (title, *head),
        [(name, *(_number(spread, column) for column in _COLUMNS)) for name, spread in rows.items()],
        right=head,
    )


def _sweep(reports: Sequence[Report]) -> None:
    """Print a row for each load, of at most 80 columns, below two lines of headings.

    With objectives the share of good requests has the place of the end-to-end time.
    """
    good = any(report.goodput for report in reports)
    times = [f"{name}\np{q} ms" for name in ("TTFT", "TPOT") for q in (50, 99)]
    last = "GOOD\n%" if good else "E2E\np50 ms"
    head = ("LOAD", "DONE", "ERR", "REQ\n/s", "OUT\ntok/s", *times, last)
    rows = []
    for report in reports:
        latency = report.latency_ms
        share = f"{100 * report.goodput.share:.0f}" if report.goodput else "-"
        cells = (
            name_of(report.settings),
            str(report.requests.completed),
            str(report.requests.failed),
            f"{report.throughput.requests_s:.2f}",
            f"{report.throughput.output_tokens_s:.0f}",
            _number(latency.ttft, "p50"),
            _number(latency.ttft, "p99"),
            _number(latency.per_token, "p50"),
            _number(latency.per_token, "p99"),
            share if good else _number(latency.e2e, "p50"),
        )
        rows.append(cells)
    output.table(head, rows, right=head[1:])
    click.echo(f"sampling: {_sampling(reports[0])}; seed {reports[0].settings.seed}")
    for kind in dict.fromkeys(kind for report in reports for kind in report.requests.errors):
        total = sum(report.requests.errors.get(kind, 0) for report in reports)
        click.echo(f"errors: {total} {kind}")
    if reports[-1].interrupted:
        click.echo(f"interrupted: the last row has {reports[-1].requests.unfinished} requests unfinished")


def _number(spread: Spread | None, column: str) -> str:
    """Return a figure in at most 7 characters: with decimals while it is small."""
    if spread is None:
        return "-"
    return _short(getattr(spread, column))


def compared(comparison: Comparison) -> None:
    """Print the changes of each load, in at most 80 columns."""
    judge = comparison.judge
    click.echo(f"{comparison.before} -> {comparison.after}")
    for name, (old, new) in comparison.different.items():
        for difference in differences(name, old, new):
            click.echo(f"measured differently: {difference}")
    for load in comparison.loads:
        runs = f"{load.before_runs} and {load.after_runs} runs"
        click.echo(f"\n{load.load}: {runs}, {load.before_requests} and {load.after_requests} requests")
        head = ("FIGURE", "BEFORE", "AFTER", "CHANGE", "FROM", "TO", "VERDICT")
        output.table(head, [_change(change) for change in load.changes], right=head[1:6])
    click.echo(
        f"\nFROM, TO: where the change is with {100 * judge.confidence:g}% confidence, by the spread between runs.\n"
        f"A verdict needs a change of more than {100 * judge.margin:g}% beyond that. Other work of the machine\n"
        "may last longer than a measurement: take runs of both sides in turn, into\n"
        "several files (--compare a1.json,a2.json b1.json,b2.json)."
    )
    if any(change.verdict == "too few runs" for load in comparison.loads for change in load.changes):
        click.echo("Too few runs: measure each side with --runs 5.")
    if any(change.verdict == "cannot tell" for load in comparison.loads for change in load.changes):
        click.echo("Cannot tell: the change may be within the margin or beyond it; more runs narrow FROM and TO.")
    for name in comparison.alone:
        click.echo(f"{name}: measured in one of the two, not compared")


def differences(name: str, old: Any, new: Any) -> Iterator[str]:
    """Yield a setting's differences, each as an option of `bench` with both values."""
    if isinstance(old, Struct) and type(old) is type(new):
        old, new = structs.asdict(old), structs.asdict(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            yield from differences(key, old.get(key, "not given"), new.get(key, "not given"))
    elif old != new:
        values = (type(value).__name__.lower() if isinstance(value, Struct) else value for value in (old, new))
        yield "{} {}, {}".format(_OPTIONS.get(name, f"--{name.replace('_', '-')}"), *values)


def _change(change: Change) -> tuple[str, ...]:
    sure = f" ({min(change.confidence, 0.999):.1%})" if change.verdict in {"faster", "slower"} else ""
    return (
        f"{change.figure} {change.unit}",
        _short(change.before),
        _short(change.after),
        f"{change.ratio - 1:+.1%}",
        *(("-", "-") if change.ratio_spread is None else (f"{end - 1:+.1%}" for end in change.ratio_spread)),
        change.verdict + sure,
    )


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"
