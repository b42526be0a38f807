"""Print answers to standard output: tables for people, JSON for programs."""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from infd.telemetry.log import plain, plain_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.admin import items, protocol

_TOKENS = ("PROMPT", "CACHED", "GENERATED")
_SLOWEST = {
    "total": "slowest requests that ended in the last {within}, by the time of the whole answer",
    "ttft": "slowest requests that ended in the last {within}, by the time until the first token",
    "queue": "slowest requests that ended in the last {within}, by the time until the first step",
}
_PIPE_WIDTH = 10_000  # columns; wide enough that rich never folds output to a pipe


def as_json(answer: msgspec.Struct) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())


def as_line(answer: msgspec.Struct) -> None:
    click.echo(msgspec.json.encode(answer).decode())


def event(event: protocol.Event) -> None:
    """Print an event as one line, not in columns, because the widths of later events are unknown."""
    if event.dropped:
        click.echo(f"{event.dropped} events before this one are forgotten", err=True)
    at = dt.datetime.fromtimestamp(event.time).astimezone().isoformat(sep=" ", timespec="milliseconds")
    facts = " ".join(f"{name}={plain(fact)}" for name, fact in event.facts.items() if fact not in (None, ""))
    click.echo(f"{at} {event.seq:>5} {event.kind:<7} {event.message} {facts}".rstrip())


def log_record(record: items.LogRecord) -> None:
    """Print a record as the daemon's own plain log does."""
    if record.dropped:
        click.echo(f"{record.dropped} records before this one are forgotten", err=True)
    text = f"{record.message}\n{record.trace}" if record.trace else record.message
    click.echo(plain_line(record.time, record.level, record.logger, text, record.fields.items()))


def status(now: protocol.Status) -> None:
    since = dt.datetime.fromtimestamp(now.since).astimezone().isoformat(sep=" ", timespec="seconds")
    rows = [
        ("state", f"{now.state}{f' ({now.reason})' if now.reason else ''} since {since}"),
        ("model", now.model),
        *((("device", f"{now.device}, {_numbers(now)}"),) if now.device else ()),
        *((("slow", f"native kernels are not used: {now.native_missing}"),) if now.native_missing else ()),
        ("infd", f"{now.version}, pid {now.pid}"),
        (
            "requests",
            f"{now.running} running, {now.waiting} waiting ({now.waiting_tokens} prompt tokens), {now.held} held",
        ),
        *(((part, held) for part, held in (("weights", now.weights), ("kv_cache", now.kv_cache)) if held != "loaded")),
        *((("stays", _sizes(now.resident)),) if now.resident else ()),
        *((("captured", _captured(now.graphs)),) if now.graphs else ()),
        *((("large pages", _large(now.large_pages)),) if now.large_pages else ()),
        *(("apart", f"{text}, whose cost is not known: {reason}") for text, reason in now.apart.items()),
        ("cache", _pages(now)),
        *((("drafts", _drafts(now)),) if now.drafts else ()),
        ("ended", _counted(now.terminal) or "none yet"),
        *((("rejected", _counted(now.rejected)),) if now.rejected else ()),
        ("limits", f"{now.max_model_len} tokens a sequence, {now.rows} sequences, {now.step_tokens} tokens a step"),
        ("steps", f"{now.steps}{'' if now.last_step_age_s is None else f', last {now.last_step_age_s:.1f} s ago'}"),
        *(("next start", f"{each.key}: {value(each.old)} -> {value(each.new)}") for each in now.restart),
    ]
    table((), rows)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def _numbers(now: protocol.Status) -> str:
    weights = "" if now.quantization == "none" else f", weights {now.quantization}"
    vocabulary = now.vocabulary and f", vocabulary {now.vocabulary}"
    cache = "" if now.cache_dtype in ("", now.dtype) else f", cache {now.cache_dtype}"
    return f"{now.dtype}{weights}{vocabulary}{cache}{_stored(now.stored)}"


def _stored(encodings: dict[str, int]) -> str:
    """Return the encodings in which the checkpoint stores quantized matrices; "" if no matrix is quantized."""
    listed = "; ".join(f"{label} ({count} matrices)" for label, count in encodings.items())
    return listed and f", stored as {listed}"


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{size / 2**20:,.0f} MiB {name.replace('_', ' ')}" for name, size in sizes.items())


def _captured(graphs: protocol.Captured) -> str:
    adapted = f", {len(graphs.with_adapters)} with adapters" if graphs.with_adapters else ""
    failed = f", {len(graphs.failed)} could not be" if graphs.failed else ""
    sizes = f"steps of {len(graphs.captured)} sizes{adapted} in {graphs.capture_s:.1f} s"
    return f"{sizes}, {graphs.to_come} to come{failed}"


def _large(pages: protocol.LargePages) -> str:
    done = f"{pages.bytes / 2**20:,.0f} of {pages.of / 2**20:,.0f} MiB of the weights"
    return f"{done}, no more to come" if pages.ended else f"{done}; others are moved while nothing is computed"


def _pages(now: protocol.Status) -> str:
    if not now.pages:
        return "none"
    free = now.pages - now.pages_referenced - now.pages_cached
    used = now.pages_referenced / now.pages
    hits = f", {now.prefix_hits / now.prefix_queries:.0%} of prompt tokens found cached" if now.prefix_queries else ""
    return f"{now.pages_referenced} pages in use ({used:.0%}), {now.pages_cached} cached, {free} free{hits}"


def _drafts(now: protocol.Status) -> str:
    kept = now.accepted_drafts
    places = " ".join(f"{count / now.drafts:.0%}" for count in kept if count)
    return f"{1 + sum(kept) / now.drafts:.2f} tokens a step; kept by position: {places or 'none'}"


def value(setting: Any) -> str:
    """Return a setting's value as JSON on one line."""
    return json.dumps(setting, ensure_ascii=False)


def requests(rows: Iterable[protocol.RequestRow]) -> None:
    table(
        ("ID", "STATE", "CLIENT", "TENANT", "ADAPTER", "PRIO", "CHOICES", "PROMPT", "CACHED", "GENERATED", "AGE"),
        (
            (
                row.id,
                row.state,
                row.client or "-",
                row.tenant or "-",
                row.adapter or "-",
                str(row.priority),
                str(row.choices),
                str(row.prompt_tokens),
                str(row.cached_tokens),
                str(row.generated_tokens),
                f"{row.age_s:.1f}s",
            )
            for row in rows
        ),
        right=("PRIO", "CHOICES", "PROMPT", "CACHED", "GENERATED", "AGE"),
        spare=("PRIO", "CHOICES", "CACHED", "ADAPTER", "TENANT"),
    )


def slow(answer: protocol.SlowRequests, by: str) -> None:
    if not answer.requests:
        click.echo(f"no request ended in the last {_span(answer.within_s)}", err=True)
        return
    click.echo(_SLOWEST[by].format(within=_span(answer.within_s)), err=True)
    table(
        ("ID", "CLIENT", "TENANT", "MODEL", "ENDED", "QUEUE", "TTFT", "TOTAL", *_TOKENS, "FINISH", "CAUSE"),
        (
            (
                row.id,
                row.client or "-",
                row.tenant or "-",
                row.model,
                time_of(row.time, time.time()),
                *map(_seconds, (row.queue_ms, row.ttft_ms, row.total_ms)),
                *map(str, (row.prompt, row.cached, row.generated)),
                row.finish,
                row.cause,
            )
            for row in answer.requests
        ),
        right=("QUEUE", "TTFT", "TOTAL", *_TOKENS),
        spare=("CAUSE", "CACHED", "MODEL", "TENANT", "FINISH", "QUEUE"),
    )


def _span(span_s: float) -> str:
    for unit, name in ((3600, "hours"), (60, "minutes")):
        if span_s >= unit and span_s % unit == 0:
            return name.removesuffix("s") if span_s == unit else f"{span_s / unit:.0f} {name}"
    return f"{span_s:.0f} seconds"


def time_of(unix_s: float, now: float) -> str:
    """Return the local time, with the date unless that is today's. Both arguments are Unix times."""
    at, today = (dt.datetime.fromtimestamp(each).astimezone() for each in (unix_s, now))
    return f"{at:%H:%M:%S}" if at.date() == today.date() else f"{at:%Y-%m-%dT%H:%M:%S}"


def _seconds(time_ms: float | None) -> str:
    return "-" if time_ms is None else f"{time_ms / 1e3:.2f}s"


def usage(answer: protocol.UsageRows) -> None:
    """Print a table of the keys and, if any key has a tenant other than itself or a quota, one of the tenants."""
    columns = ("REQUESTS", "LIMITED", "REFUSED", "ANSWERED", *_TOKENS)
    table(
        ("KEY", "TENANT", *columns),
        ((row.key or "-", row.tenant or "-", *_counts(row)) for row in answer.usage),
        right=columns,
    )
    if any(row.tenant != row.key for row in answer.usage) or any(row.quota for row in answer.tenants):
        click.echo()
        table(
            ("TENANT", "KEYS", *columns, "QUOTA"),
            ((row.tenant or "-", str(row.keys), *_counts(row), row.quota or "-") for row in answer.tenants),
            right=("KEYS", *columns),
        )


def _counts(row: protocol.UsageRow | protocol.TenantUsage) -> Iterable[str]:
    return map(str, (row.requests, row.limited, row.refused, row.answered, row.prompt, row.cached, row.generated))


def loras(answer: protocol.Loras) -> None:
    table(
        ("NAME", "STATE", "RANK", "MIB", "GENERATION", "REQUESTS", "BASE", "PATH"),
        (
            (
                row.name,
                row.state,
                str(row.rank),
                f"{row.bytes / 2**20:.1f}",
                str(row.generation),
                str(row.requests),
                row.base or "-",
                row.path,
            )
            for row in answer.loras
        ),
        right=("RANK", "MIB", "GENERATION", "REQUESTS"),
    )


def ops(answer: protocol.Ops) -> None:
    kept = "" if answer.quantization == "none" else f", weights {answer.quantization}"
    click.echo(f"device {answer.device or 'none'}, dtype {answer.dtype or 'none'}{kept}{_stored(answer.stored)}")
    table(
        ("FAMILY", "CHOSEN", "REFUSED"),
        (
            (row.family, row.chosen, "; ".join(f"{name}: {reason}" for name, reason in row.refused.items()) or "-")
            for row in answer.ops
        ),
    )


def experts(answer: protocol.Experts) -> None:
    if not answer.layers:
        click.echo("no loads: no step with experts was sampled yet, or infd's own code routes no experts of this model")
        return
    click.echo(f"{answer.steps} sampled steps; layers count those with experts")
    table(
        ("LAYER", "CHOICES", "BUSIEST/MEAN", "UNUSED", "BUSIEST EXPERTS"),
        (
            (str(load.layer), str(load.choices), f"{load.ratio:.2f}", str(load.unused), _busiest(load))
            for load in answer.layers
        ),
        right=("LAYER", "CHOICES", "BUSIEST/MEAN", "UNUSED"),
    )


def _busiest(load: protocol.ExpertLoad) -> str:
    order = sorted(range(len(load.counts)), key=lambda expert: -load.counts[expert])[:4]
    return ", ".join(f"{expert} ({load.counts[expert] / max(1, load.choices):.1%})" for expert in order)


def dump(answer: protocol.Dump) -> None:
    for kind, stacks in (("task", answer.tasks), ("thread", answer.threads)):
        for stack in stacks:
            click.echo(f"{kind} {stack.name}")
            for frame in stack.frames:
                click.echo(f"    {frame}")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), spare: Sequence[str] = ()
) -> None:
    """Print rows in columns. Colors only on a terminal without NO_COLOR.

    right  columns that are right-aligned
    spare  columns left out on a terminal too narrow for all, the first of them first; standard error names them
    """
    from rich.console import Console  # imported here, because importing rich takes longer than most commands
    from rich.table import Table
    from rich.text import Text

    body = [[Text(cell) for cell in row] for row in rows]  # rich would interpret markup in a str
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    widths = {name: max(len(name), *(len(row[at]) for row in body)) for at, name in enumerate(head) if body}
    left_out = left_out_of(widths, spare, console.width)
    grid = Table(box=None, pad_edge=False, show_header=bool(head))
    shown = [at for at in range(len(head) or max(map(len, body), default=0)) if not head or head[at] not in left_out]
    for at in shown:
        name = head[at] if head else ""
        first = "cyan" if at == 0 else ""
        grid.add_column(name, justify="right" if name in right else "left", style=first, overflow="fold")
    for row in body:
        grid.add_row(*(row[at] for at in shown))
    with console.capture() as drawn:
        console.print(grid)
    for line in drawn.get().splitlines():
        click.echo(line.rstrip())  # removes the padding of the last column
    if left_out:
        click.echo(f"without {', '.join(left_out)}, for want of room; a wider terminal or a pipe has all", err=True)


def left_out_of(widths: dict[str, int], spare: Sequence[str], width: int) -> list[str]:
    """Return the first of the `spare` columns, as many as must go until the others fit, or all."""
    left_out: list[str] = []
    for name in spare:
        kept = [each for column, each in widths.items() if column not in left_out]
        if sum(kept) + 2 * (len(kept) - 1) <= width:
            break
        left_out.append(name)
    return left_out
