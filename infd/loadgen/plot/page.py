"""The page: figures as a table, then the charts. Follows the reader's light or dark scheme, and fits narrow windows."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from infd.loadgen.plot.charts import COLOURS, Drawn, Named, distributions, loads, timeline
from infd.loadgen.plot.svg import short

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from infd.loadgen.figures import Report, Spread
    from infd.loadgen.record import Record

_OPEN: Final = 2  # timelines that are shown; others unfold

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2126; --dim: #5d6770; --line: #dde2e6; --paper: #fff; --card: #f7f8f9;
  --c0: #1565c0; --c1: #c2410c; --c2: #2e7d32; --c3: #8e24aa; --c4: #00838f; --c5: #b8860b; --c6: #ad1457;
  --c7: #546e7a; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --dim: #9aa5ae; --line: #343b41; --paper: #15181b;
  --card: #1d2226; --c0: #64b5f6; --c1: #ff9e6d; --c2: #81c784; --c3: #ce93d8; --c4: #4dd0e1; --c5: #e6c04a;
  --c6: #f48fb1; --c7: #b0bec5; --bad: #ef7070; } }
body { margin: 0 auto; max-width: 1320px; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
h3 { font-size: .92rem; margin: 0 0 .3rem; }
p { margin: .2rem 0; color: var(--dim); overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; font-size: .82rem; } th:first-child, td:first-child { text-align: left; }
.charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 390px), 1fr)); }
figure { margin: 0; padding: .7rem; background: var(--card); border-radius: 6px; min-width: 0; }
figcaption { font-size: .8rem; color: var(--dim); display: flex; flex-wrap: wrap; gap: .1rem .9rem; }
.key { display: inline-block; width: 1em; height: .7em; border-radius: 2px; margin-right: .35em; }
span.key.dashed { width: 1.7em; height: 0; border-radius: 0; background: none; border-width: 2px 0 0;
  border-style: dashed; vertical-align: .25em; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--dim); }
svg .label { fill: var(--ink); } .grid { stroke: var(--line); } .axis { stroke: var(--dim); }
.line { fill: none; stroke-width: 1.8; } .line.dashed { stroke-dasharray: 5 3; }
svg .held { fill: var(--line); } svg .waiting { fill: var(--c5); } svg .writing { fill: var(--c0); }
svg .failed { fill: var(--bad); } .key.held { background: var(--line); } .key.waiting { background: var(--c5); }
.key.writing { background: var(--c0); } .key.failed { background: var(--bad); }
summary { cursor: pointer; margin: .5rem 0; }
""" + "".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} .dot.c{n} {{ fill: var(--c{n}); }}"
    f" .key.c{n} {{ background: var(--c{n}); border-color: var(--c{n}); }}\n"
    for n in range(COLOURS)
)

_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head><body>"""


def page(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page of one measurement, or of several side by side. `names`: of those without a label."""
    several = len(records) > 1
    runs = [
        run
        for record, name in zip(records, names, strict=True)
        for run in Named.all_of((record.label or name) if several else "", record.runs)
    ]
    title = " and ".join(record.label or name for record, name in zip(records, names, strict=True))
    body = [f"<h1>{escape(title)}</h1>", *_circumstances(records), "<h2>Figures</h2>", _table(runs)]
    if drawn := list(loads(runs)):
        body += ["<h2>Latency against load</h2>", _charts(drawn)]
    body += ["<h2>Distributions</h2>", _charts(distributions(runs)), "<h2>Timelines</h2>"]
    for number, run in enumerate(runs):
        opened = " open" if number < _OPEN else ""
        body.append(f"<details{opened}><summary>{escape(run.name)}</summary>{_charts(timeline(run))}</details>")
    return "\n".join((_HEAD.format(title=escape(title), style=_STYLE), *body, "</body></html>\n"))


def _circumstances(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        report = record.runs[0]
        sampling = ", ".join(f"{name} {value}" for name, value in report.sampling.items()) or "the server's defaults"
        facts = [f"{report.model} at {report.settings.url}", report.started, f"sampling: {sampling}"]
        facts += [f"{name}: {value}" for name, value in record.metadata.items()]
        yield f"<p>{escape(record.label + ': ' if record.label else '')}{escape(' · '.join(facts))}</p>"


def _table(runs: Sequence[Named]) -> str:
    head = (
        "load",
        "done",
        "failed",
        "requests / s",
        "tokens / s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "end p50",
        "p99",
    )
    good = any(run.report.goodput for run in runs)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _row(run, good=good)) + "</tr>" for run in runs
    )
    titles = "".join(f"<th>{escape(title)}</th>" for title in (*head, *(("good",) if good else ())))
    return f'<div class="wide"><table><tr>{titles}</tr>{rows}</table></div><p>Latencies in milliseconds.</p>'


def _row(run: Named, *, good: bool) -> tuple[str, ...]:
    report: Report = run.report
    latency = report.latency_ms
    spreads = (latency.ttft, latency.per_token, latency.e2e)
    counts = (str(report.requests.completed), str(report.requests.failed))
    rates = (short(report.throughput.requests_s), short(report.throughput.output_tokens_s))
    share = (f"{report.goodput.share:.1%}" if report.goodput else "-",) if good else ()
    return run.name, *counts, *rates, *(_at(spread, q) for spread in spreads for q in ("p50", "p99")), *share


def _at(spread: Spread | None, q: str) -> str:
    return "-" if spread is None else short(getattr(spread, q))


def _charts(drawn: Iterable[Drawn]) -> str:
    return '<div class="charts">' + "".join(_figure(one) for one in drawn) + "</div>"


def _figure(drawn: Drawn) -> str:
    keys = "".join(f'<span><span class="key {style}"></span>{escape(name)}</span>' for style, name in drawn.legend)
    note = f"<span>{escape(drawn.note)}</span>" if drawn.note else ""
    return f"<figure><h3>{escape(drawn.heading)}</h3>{drawn.svg}<figcaption>{keys}{note}</figcaption></figure>"
