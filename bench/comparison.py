"""Measure servers in turns, and say how many times better the first of them is than each of the others.

A round takes every workload to every server, one window after the other, so that what disturbs the machine meets all
alike; ratios are of windows of one round. All servers are up the whole time, and all but the one that is measured are
frozen. A window counts only if the memory could be read at its usual rate before and after it, and only if every
answer had the tokens that were asked for.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import statistics
import sys
import time
import zlib
from contextlib import AsyncExitStack, contextmanager
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, field
from server_process import ServerProcess, free_port
from workloads import FIGURES, Workload

from infd.loadgen.load import Settings, offer
from infd.loadgen.stream import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from infd.loadgen.figures import Report as Measured

_LENGTH_TOLERANCE = 0.05  # of a prompt: words are whole, and some cost more tokens than others


class Refused(Exception):
    """A server that cannot be compared, and why."""


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One to be measured.

    command      as a shell would split it; put in are the environment's variables and $port, $model, $threads (as many
                 as cores), $python (which runs this) and $logs (a directory)
    url          of a server that somebody else has started, instead of a command: neither pinned nor frozen
    ready        a path that answers 200 once the server can be asked
    model        the name that requests give, or $model; empty: the first that the server lists
    body         what requests say beside the usual: how this server is made to answer to the length that was asked for
    weights_gb   what a token reads of the weights: gives the share of the memory's rate that decoding reaches
    """

    name: Annotated[str, Meta(min_length=1)]
    command: str = ""
    url: str = ""
    ready: str = "/v1/models"
    model: str = ""
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    environment: dict[str, str] = {}  # with the same put in
    weights_gb: Annotated[float, Meta(gt=0)] | None = None
    start_s: Annotated[float, Meta(gt=0)] = 600.0  # vLLM takes minutes where others are at work


class Plan(Struct, frozen=True, kw_only=True):
    """How it is measured.

    endpoint   completions by default: a template would not add as many tokens for every server
    cores      of every server
    tolerance  how far the memory's rate may be from the first one measured before a window is thrown away
    tries      windows of one kind in one round, until one is good
    minutes    once they are over no further round begins; None: all of them
    settle_s   how long each server is left alone before it is asked anything: some put their memory in order then
    """

    model: str
    rounds: int
    cores: tuple[int, ...]
    client_cores: tuple[int, ...]
    workloads: tuple[Workload, ...]
    endpoint: str = "completions"
    tolerance: float = 0.15
    tries: int = 3
    seed: int = 0
    minutes: float | None = None
    timeout_s: float = 300.0
    settle_s: float = 0.0


class Window(Struct, frozen=True, kw_only=True):
    """One workload at one server.

    gb_s        the memory's rate before and after
    client_cpu  cores that the client took of the machine meanwhile
    good        or else thrown away: it is kept here, and in no figure
    """

    round: int
    server: str
    workload: str
    figures: dict[str, float]
    gb_s: tuple[float, float]
    client_cpu: float
    good: bool
    measured: Measured


class Started(Struct, frozen=True, kw_only=True):
    """What is known of a server before it is asked anything. resident_bytes is shared memory in part."""

    server: Server
    ready_s: float
    resident_bytes: int


class Ratio(Struct, frozen=True, kw_only=True):
    """How many times better the first server is, by pairs of one round: above 1, whatever the figure, it is ahead."""

    workload: str
    figure: str
    peer: str
    pairs: int
    median: float
    least: float
    most: float


class Report(Struct, kw_only=True):
    """Everything that was measured; what was refused, by server."""

    plan: Plan
    machine: str
    gb_s: float
    started: list[Started] = []
    windows: list[Window] = []
    ratios: list[Ratio] = []
    refused: dict[str, str] = {}

    def median(self, server: str, workload: str, figure: str) -> float | None:
        values = [window.figures[figure] for window in self._good(server, workload) if figure in window.figures]
        return statistics.median(values) if values else None

    def share_of_memory(self, server: Server, workload: str) -> float | None:
        """Return how much of the memory's rate, as it was then, reading the weights for one stream's tokens took."""
        shares = [
            window.figures["stream"] * server.weights_gb / statistics.mean(window.gb_s)
            for window in self._good(server.name, workload)
            if server.weights_gb and "stream" in window.figures
        ]
        return statistics.median(shares) if shares else None

    def sum_up(self) -> None:
        """Make ratios of the windows that there are."""
        first, *peers = (started.server.name for started in self.started)
        self.ratios = [
            ratio
            for workload in self.plan.workloads
            for figure in workload.figures
            for peer in peers
            if (ratio := self._ratio(workload.name, figure, first, peer)) is not None
        ]

    def _ratio(self, workload: str, figure: str, first: str, peer: str) -> Ratio | None:
        ours, theirs = (
            {window.round: window.figures[figure] for window in self._good(name, workload) if figure in window.figures}
            for name in (first, peer)
        )
        pairs = [
            ours[number] / theirs[number] if FIGURES[figure].more_is_better else theirs[number] / ours[number]
            for number in ours.keys() & theirs.keys()
        ]
        if not pairs:
            return None
        return Ratio(
            workload=workload,
            figure=figure,
            peer=peer,
            pairs=len(pairs),
            median=statistics.median(pairs),
            least=min(pairs),
            most=max(pairs),
        )

    def _good(self, server: str, workload: str) -> Iterator[Window]:
        for window in self.windows:
            if window.good and (window.server, window.workload) == (server, workload):
                yield window


class Rival:
    """A server that is up."""

    def __init__(self, server: Server, process: ServerProcess | None) -> None:
        self.server = server
        self.url = process.url if process else server.url
        self._process = process

    @contextmanager
    def awake(self) -> Iterator[None]:
        if self._process is None:
            yield
            return
        self._process.thaw()
        try:
            yield
        finally:
            self._process.freeze()


async def compare(
    plan: Plan,
    servers: tuple[Server, ...],
    gb_s: Callable[[], float],
    logs: Path,
    *,
    machine: str = "",
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Measure them all. The first is the one that the others are compared with.

    gb_s  reads the memory and returns its rate
    logs  a directory for what servers print
    keep  is given the report after each round, in case there is no next one

    A server that fails is left out from there on, and the report says why. Raises Refused if that leaves no pair.
    """
    started = time.monotonic()
    report = Report(plan=plan, machine=machine, gb_s=statistics.median(gb_s() for _ in range(9)))
    tell(f"memory reads at {report.gb_s:.1f} GB/s")
    async with AsyncExitStack() as stack:
        rivals: dict[str, Rival] = {}
        for server in servers:
            try:
                process = _process(plan, server, logs)
                if process is not None:
                    await stack.enter_async_context(process)
                rivals[server.name] = await _meet(plan, server, process, report)
                tell(f"{server.name} is up")
            except (Refused, RequestFailed, RuntimeError, OSError) as error:
                _leave_out(server.name, error, report, logs, tell)
        for number in range(plan.rounds):
            if number and plan.minutes is not None and time.monotonic() > started + 60 * plan.minutes:
                tell(f"{plan.minutes:g} minutes are over")
                break
            for workload in plan.workloads:
                # Whoever goes first in one round goes last in the next: a drift meets all alike.
                for rival in list(rivals.values())[:: 1 if number % 2 == 0 else -1]:
                    _check_that_a_pair_is_left(servers, rivals, report)
                    try:
                        await _measure(rival, workload, number, report, gb_s, tell)
                    except (Refused, RequestFailed) as error:
                        del rivals[rival.server.name]
                        _leave_out(rival.server.name, error, report, logs, tell)
            report.sum_up()
            keep(report)
    _check_that_a_pair_is_left(servers, rivals, report)
    return report


def _process(plan: Plan, server: Server, logs: Path) -> ServerProcess | None:
    if bool(server.command) == bool(server.url):
        raise Refused("it has to have a command or a url, and not both")
    if server.url:
        return None
    port = free_port()
    known = {
        **os.environ,
        "model": plan.model,
        "port": str(port),
        "threads": str(len(plan.cores)),
        "python": sys.executable,
        "logs": str(logs),
    }
    try:
        command = [Template(word).substitute(known) for word in shlex.split(server.command)]
        environment = {name: Template(value).substitute(known) for name, value in server.environment.items()}
    except KeyError as error:
        raise Refused(f"its command names ${error.args[0]}, which the environment does not have") from None
    except ValueError as error:
        raise Refused(f"its command cannot be read: {error}") from None
    return ServerProcess(
        server.name,
        command,
        port,
        ready=server.ready,
        start_s=server.start_s,
        cores=plan.cores,
        environment=environment,
        log=logs / f"{server.name}.log",
    )


async def _meet(plan: Plan, server: Server, process: ServerProcess | None, report: Report) -> Rival:
    """Ask it something, so that what is done once is done, then see what it holds."""
    rival = Rival(server, process)
    trial = Workload(name="trial", figures=(), requests=1, input_tokens=32, output_tokens=4)
    with rival.awake():
        await asyncio.sleep(plan.settle_s)
        resident = process.resident_bytes() if process else 0
        _check(trial, await offer(_settings(rival, trial, plan, "trial")))
    report.started.append(Started(server=server, ready_s=process.ready_s if process else 0.0, resident_bytes=resident))
    return rival


async def _measure(
    rival: Rival,
    workload: Workload,
    number: int,
    report: Report,
    gb_s: Callable[[], float],
    tell: Callable[[str], None],
) -> None:
    plan = report.plan
    for trial in range(plan.tries):
        settings = _settings(rival, workload, plan, f"round {number}, try {trial}")
        before = gb_s()
        with rival.awake():
            began, spent = time.perf_counter(), time.process_time()
            measured = await offer(settings)
            client_cpu = (time.process_time() - spent) / (time.perf_counter() - began)
        _check(workload, measured)
        rates = (before, gb_s())
        good = all(abs(rate / report.gb_s - 1) <= plan.tolerance for rate in rates)
        figures = {name: value for name in workload.figures if (value := FIGURES[name].of(measured)) is not None}
        report.windows.append(
            Window(
                round=number,
                server=rival.server.name,
                workload=workload.name,
                figures=figures,
                gb_s=rates,
                client_cpu=client_cpu,
                good=good,
                measured=measured,
            )
        )
        shown = ", ".join(f"{FIGURES[name].title} {value:.1f} {FIGURES[name].unit}" for name, value in figures.items())
        verdict = "" if good else f"; thrown away, memory read at {rates[0]:.1f} and {rates[1]:.1f} GB/s"
        tell(f"round {number + 1}, {workload.name}, {rival.server.name}: {shown}{verdict}")
        if good:
            return


def _settings(rival: Rival, workload: Workload, plan: Plan, turn: str) -> Settings:
    """Say what is offered: the same to all in one turn, and nothing that was in a prompt before."""
    return Settings(
        url=rival.url,
        model=Template(rival.server.model).substitute(model=plan.model),
        endpoint=plan.endpoint,
        requests=workload.requests,
        concurrency=workload.concurrency,
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        prompts=workload.prompts,
        shared=workload.shared,
        temperature=0.0,
        seed=zlib.crc32(f"{plan.seed} {workload.name} {turn}".encode()),
        warmup=workload.warmup,
        timeout_s=plan.timeout_s,
        body=rival.server.body,
    )


def _check(workload: Workload, measured: Measured) -> None:
    """Raise Refused unless every answer came, and all were as long as those of any other server."""
    if measured.requests.failed:
        kinds = ", ".join(f"{count} times {kind}" for kind, count in measured.requests.errors.items())
        raise Refused(f"{workload.name}: {measured.requests.failed} of {workload.requests} requests failed: {kinds}")
    wanted = workload.requests * workload.output_tokens
    if measured.tokens.output != wanted:
        raise Refused(
            f"{workload.name}: {measured.tokens.output} tokens came where {wanted} were asked for "
            f"(counted by the {measured.tokens.counted}): its `body` must say how it is made to go on"
        )
    if measured.tokens.counted != "server":
        return  # nor is it told how long prompts were; the client made them by what the server said of its probes
    read, asked = measured.tokens.input / workload.requests, workload.input_tokens
    if abs(read - asked) > max(_LENGTH_TOLERANCE * asked, 2):
        raise Refused(f"{workload.name}: it read prompts of {read:.0f} tokens where {asked} were meant")


def _leave_out(name: str, error: Exception, report: Report, logs: Path, tell: Callable[[str], None]) -> None:
    report.refused[name] = str(error)
    tell(f"{name} is left out: {error}")
    log = logs / f"{name}.log"
    if log.exists():
        for line in log.read_text(errors="replace").splitlines()[-5:]:
            tell(f"  {name}: {line}")


def _check_that_a_pair_is_left(servers: tuple[Server, ...], rivals: Mapping[str, Rival], report: Report) -> None:
    if servers[0].name not in rivals or len(rivals) < 2:
        raise Refused(
            "; ".join(f"{name}: {reason}" for name, reason in report.refused.items()) or "there is one server"
        )
