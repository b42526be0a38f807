"""Compare OpenAI servers on one machine, in turns: medians of each, and ratios to the first.

    python bench/random_checkpoint.py 0.6b DIR
    python bench/compare.py --model DIR --servers bench/peers.toml --only infd --only llama.cpp --json report.json
    python bench/compare.py --model DIR --servers bench/encoders.toml --task embed

bench/peers.md describes how to install the servers of bench/peers.toml; `--server NAME=COMMAND` adds others. Servers
and client share cores unless --client-cores is set: on two cores, a core for the client alone would halve every
server. The report shows the client's CPU time. Prompts are random words, with a common prefix where a workload says
so.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
import uvloop
from bandwidth import MemoryProbe
from comparison import Plan, Refused, Report, Server, compare
from msgspec import Struct
from workloads import BY_TASK, FIGURES, Workload

from infd.admin.ctl import show

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from infd.loadgen.settings import Task

Named = TypeVar("Named", Server, Workload)


class File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A TOML file of servers and further workloads."""

    server: tuple[Server, ...] = ()
    workload: tuple[Workload, ...] = ()


@click.command(help=__doc__.splitlines()[0])
@click.option("--model", required=True, type=click.Path(exists=True), help="The checkpoint, $model in commands.")
@click.option("--servers", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A TOML file.")
@click.option("--server", "commands", multiple=True, metavar="NAME=COMMAND", help="One more. Repeatable.")
@click.option("--only", multiple=True, metavar="NAME", help="These servers, in this order. Repeatable.")
@click.option("--task", type=click.Choice(list(BY_TASK)), default="generate", show_default=True)
@click.option("--workload", "names", multiple=True, metavar="NAME", help="These workloads. Repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--minutes", type=click.FloatRange(0), help="Begin no further round once they are over.")
@click.option("--cores", help="Of every server, such as 0,1. Default: all that this process may run on.")
@click.option("--client-cores", help="Of the client. Default: those of the servers.")
@click.option("--tolerance", type=click.FloatRange(0), default=0.15, show_default=True, help="Of the memory's rate.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option(
    "--settle", type=click.FloatRange(0), default=10.0, show_default=True, help="Seconds alone after the start."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Where servers' output is kept.")
@click.option("--json", "kept", type=click.Path(dir_okay=False, path_type=Path), help="Written after each round.")
def main(
    model: str,
    file: Path | None,
    commands: tuple[str, ...],
    only: tuple[str, ...],
    task: Task,
    names: tuple[str, ...],
    rounds: int,
    minutes: float | None,
    cores: str | None,
    client_cores: str | None,
    tolerance: float,
    endpoint: str,
    settle: float,
    seed: int,
    logs: Path | None,
    kept: Path | None,
) -> None:
    read = _read(file)
    own = _cores(cores, "--cores") if cores else tuple(sorted(os.sched_getaffinity(0)))
    plan = Plan(
        model=os.path.abspath(model),
        rounds=rounds,
        minutes=minutes,
        cores=own,
        client_cores=_cores(client_cores, "--client-cores") if client_cores else own,
        workloads=_chosen(names, read.workload if read.workload and not names else (*BY_TASK[task], *read.workload)),
        endpoint=endpoint,
        tolerance=tolerance,
        settle_s=settle,
        seed=seed,
    )
    servers = _chosen(only, (*read.server, *map(_server, commands)))
    if len(servers) < 2:
        raise click.UsageError("it takes two servers: name them with --servers or --server")
    os.sched_setaffinity(0, plan.client_cores)

    def keep(report: Report) -> None:
        if kept is not None:
            kept.write_bytes(msgspec.json.format(msgspec.json.encode(report)))

    with (
        tempfile.TemporaryDirectory() as scratch,
        MemoryProbe(own) as probe,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        try:
            report = runner.run(
                _ended_by_term(
                    compare(plan, servers, probe.gb_s, logs or Path(scratch), machine=_machine(), tell=_tell, keep=keep)
                )
            )
        except Refused as refusal:
            raise click.ClickException(str(refusal)) from None
        except asyncio.CancelledError:
            raise click.Abort from None
    _show(report)
    if report.refused:
        raise SystemExit(1)


async def _ended_by_term(comparison: Coroutine[Any, Any, Report]) -> Report:
    """On TERM end the servers too, as on an interrupt: frozen servers would otherwise stay forever."""
    task = asyncio.ensure_future(comparison)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _read(file: Path | None) -> File:
    if file is None:
        return File()
    try:
        return msgspec.toml.decode(file.read_bytes(), type=File)
    except msgspec.MsgspecError as error:
        raise click.BadParameter(f"{file}: {error}", param_hint="--servers") from None


def _server(text: str) -> Server:
    name, equals, command = text.partition("=")
    if not (name and equals and command):
        raise click.BadParameter(f"{text!r} is not NAME=COMMAND", param_hint="--server")
    return Server(name=name, command=command)


def _cores(text: str, option: str) -> tuple[int, ...]:
    try:
        cores = tuple(int(core) for core in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 0,1", param_hint=option) from None
    if missing := set(cores) - os.sched_getaffinity(0):
        raise click.BadParameter(f"this process may not run on {min(missing)}", param_hint=option)
    return cores


def _chosen(names: tuple[str, ...], known: tuple[Named, ...]) -> tuple[Named, ...]:
    """Return the items with the given names, in their order, or all. The later of two equal names counts."""
    by_name = {each.name: each for each in known}
    if unknown := [name for name in names if name not in by_name]:
        raise click.UsageError(f"there is no {unknown[0]!r}, but {', '.join(by_name)}")
    return tuple(by_name[name] for name in names or by_name)


def _machine() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()}, Linux {platform.release()}"


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _show(report: Report) -> None:
    servers = [started.server for started in report.started]
    names = [server.name for server in servers]
    rounds = len({window.round for window in report.windows})
    thrown = sum(not window.good for window in report.windows)
    client = max((window.client_cpu for window in report.windows), default=0.0)
    click.echo(
        f"{report.machine}; servers on cores {','.join(map(str, report.plan.cores))}; "
        f"memory reads at {report.gb_s:.1f} GB/s\n"
        f"{rounds} rounds, {thrown} of {len(report.windows)} windows thrown away; "
        f"the client took {client:.2f} cores at most\n"
    )
    rows = [
        ("start to ready", "", "s", *(f"{started.ready_s:.1f}" for started in report.started)),
        ("resident, idle", "", "MiB", *(f"{started.resident_bytes / 2**20:.0f}" for started in report.started)),
    ]
    for workload in report.plan.workloads:
        for name in workload.figures:
            figure = FIGURES[name]
            values = [report.median(server, workload.name, name) for server in names]
            rows.append((workload.name, figure.title, figure.unit, *map(_number, values)))
        if "stream" in workload.figures:
            shares = [report.share_of_memory(server, workload.name) for server in servers]
            shown = ("-" if share is None else f"{100 * share:.0f}" for share in shares)
            rows.append((workload.name, "of the memory's rate", "%", *shown))
    show.table(("MEDIANS", "", "", *names), rows, right=names)
    click.echo()
    show.table(
        (f"{names[0]} IS BETTER BY", "", "THAN", "MEDIAN", "LEAST", "MOST", "PAIRS"),
        [
            (
                ratio.workload,
                FIGURES[ratio.figure].title,
                ratio.peer,
                f"{ratio.median:.2f}",
                f"{ratio.least:.2f}",
                f"{ratio.most:.2f}",
                str(ratio.pairs),
            )
            for ratio in report.ratios
        ],
        right=("MEDIAN", "LEAST", "MOST", "PAIRS"),
    )
    for name, reason in report.refused.items():
        click.echo(f"\n{name} was left out: {reason}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    main()
