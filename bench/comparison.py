"""Measure servers in turns, and compute the first server's ratio to each other server.

A round measures every workload on every server, one window after another, so that disturbances affect all servers;
ratios are of windows of one round. All servers run throughout; all but the measured server are frozen. A window counts
only if memory bandwidth was normal before and after it, and every answer had the requested number of tokens.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import statistics
import sys
import time
import zlib
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, field, structs
from server_process import ServerProcess, free_port
from workloads import FIGURES, Workload

from infd.loadgen.datasets.spec import Synthetic
from infd.loadgen.load import Silent, connect, offer
from infd.loadgen.settings import Settings
from infd.loadgen.stream import RequestFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from infd.loadgen.figures import Report as Measured
    from infd.loadgen.load import Generator

_LENGTH_TOLERANCE = 0.05  # of a prompt: a whole number of words, some of several tokens
_CROWD = 20  # background requests of a client that are written at once


class Refused(Exception):
    """A server cannot be compared; the message gives the reason."""


class Server(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server to measure.

    command      split as by a shell; environment variables are substituted, and $port, $model, $threads (number of
                 cores), $python (this interpreter) and $logs (a directory)
    url          of a running server, instead of a command; neither pinned nor frozen
    environment  variables for the command, with the same substitutions
    ready        path that answers 200 once the server is ready
    model        name in requests, or $model; empty: the first that the server lists
    body         extra request fields, such as those that make this server generate the full length
    weights_gb   weights read per token, to compute the fraction of memory bandwidth that decoding reaches
    """

    name: Annotated[str, Meta(min_length=1)]
    command: str = ""
    url: str = ""
    ready: str = "/v1/models"
    model: str = ""
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    environment: dict[str, str] = {}
    weights_gb: Annotated[float, Meta(gt=0)] | None = None
    start_s: Annotated[float, Meta(gt=0)] = 600.0  # vLLM takes minutes on a busy machine


class Plan(Struct, frozen=True, kw_only=True):
    """Parameters of a comparison.

    endpoint   default: completions, because chat templates add different numbers of tokens
    cores      of every server
    tolerance  largest relative deviation of memory bandwidth from the first measurement; beyond, a window is discarded
    tries      most windows of a workload and server in a round, until one is good
    minutes    no round begins after this time; None: run all rounds
    settle_s   idle time of each server before its first request, in which some reorganize memory
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
    """One measurement of a workload on a server.

    gb_s        memory bandwidth before and after
    client_cpu  cores used by the client
    good        counts; a discarded window is listed but in no figure
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
    """Properties of a server before the first window. Part of resident_bytes is shared memory."""

    server: Server
    ready_s: float
    resident_bytes: int


class Ratio(Struct, frozen=True, kw_only=True):
    """The first server's advantage in a figure, from pairs of windows of a round; above 1: the first is better."""

    workload: str
    figure: str
    peer: str
    pairs: int
    median: float
    least: float
    most: float


class Report(Struct, kw_only=True):
    """All measurements, and by server the reasons for exclusion."""

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
        """Return the fraction of memory bandwidth used to read weights for one stream's tokens."""
        shares = [
            window.figures["stream"] * server.weights_gb / statistics.mean(window.gb_s)
            for window in self._good(server.name, workload)
            if server.weights_gb and "stream" in window.figures
        ]
        return statistics.median(shares) if shares else None

    def sum_up(self) -> None:
        """Compute ratios from the present windows."""
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
    """A running server."""

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
    """Measure all servers; the others are compared with the first.

    gb_s  measures memory bandwidth
    logs  directory for the servers' output
    keep  receives the report after each round, so that an interrupted run is not lost

    A server that fails is excluded from then on, with the reason in the report. Raises Refused if no pair
    remains.
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
                # The order reverses every round, so that a drift affects all servers alike.
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
    """Send a first request, which triggers one-time work, then measure resident memory."""
    rival = Rival(server, process)
    trials = [
        Workload(
            name="trial", task=task, figures=(), requests=1, input_tokens=32, output_tokens=4 * (task == "generate")
        )
        for task in sorted({workload.task for workload in plan.workloads})
    ]
    with rival.awake():
        await asyncio.sleep(plan.settle_s)
        resident = process.resident_bytes() if process else 0
        for trial in trials:
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
            async with _beside(rival, workload, plan):
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
                measured=structs.replace(measured, samples=[], failures=[]),  # their size
            )
        )
        shown = ", ".join(f"{FIGURES[name].title} {value:.1f} {FIGURES[name].unit}" for name, value in figures.items())
        verdict = "" if good else f"; thrown away, memory read at {rates[0]:.1f} and {rates[1]:.1f} GB/s"
        tell(f"round {number + 1}, {workload.name}, {rival.server.name}: {shown}{verdict}")
        if good:
            return


def _settings(rival: Rival, workload: Workload, plan: Plan, turn: str) -> Settings:
    """Return the load settings: equal for all servers of a turn, with prompts not sent before."""
    return Settings(
        url=rival.url,
        model=Template(rival.server.model).substitute(model=plan.model),
        endpoint=plan.endpoint,
        task=workload.task,
        inputs=workload.inputs,
        requests=workload.requests,
        concurrency=workload.concurrency,
        dataset=Synthetic(
            input_tokens=workload.input_tokens,
            input_range=workload.input_range,
            output_tokens=workload.output_tokens or 1,
            shared=workload.shared,
        ),
        exact=False,
        seed=zlib.crc32(f"{plan.seed} {workload.name} {turn}".encode()),
        warmup=workload.warmup,
        timeout_s=plan.timeout_s,
        body={"temperature": 0.0, **rival.server.body} if workload.task == "generate" else rival.server.body,
    )


@asynccontextmanager
async def _beside(rival: Rival, workload: Workload, plan: Plan) -> AsyncIterator[None]:
    """Keep the workload's background requests in flight, from before the block until its end."""
    if workload.beside is None:
        yield
        return
    crowd = Workload(
        name=f"beside {workload.name}",
        figures=(),
        task=workload.task,
        requests=_CROWD * workload.beside.concurrency,
        concurrency=workload.beside.concurrency,
        input_tokens=workload.beside.input_tokens,
        output_tokens=workload.output_tokens,
    )
    settings = _settings(rival, crowd, plan, "beside")
    begun = _Begun()
    async with connect(settings, observer=begun) as generator:
        crowding = asyncio.create_task(_endlessly(generator, crowd, settings, begun))
        try:
            await begun.event.wait()
            yield
        finally:
            crowding.cancel()
            with suppress(asyncio.CancelledError):
                await crowding  # raises Refused or RequestFailed


class _Begun(Silent):
    """event is set once a request has ended."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def advance(self, what: str, done: int, total: int) -> None:
        if what == "requests":
            self.event.set()


async def _endlessly(generator: Generator, crowd: Workload, settings: Settings, begun: _Begun) -> None:
    """Offer the load again and again until cancelled. Raises Refused if a request fails, or is read cut."""
    try:
        for turn in count():
            load = structs.replace(settings, seed=settings.seed + turn)
            report = await generator.offer(load, keep_on_cancel=True)
            if failed := report.requests.failed:
                raise Refused(f"{failed} requests beside the measured ones failed")
            _check_lengths(crowd, report)
            if report.interrupted:
                return
    finally:
        begun.event.set()


def _check(workload: Workload, measured: Measured) -> None:
    """Raise Refused unless every request succeeded, with the same lengths as on other servers."""
    if measured.requests.failed:
        kinds = ", ".join(f"{count} times {kind}" for kind, count in measured.requests.errors.items())
        raise Refused(f"{workload.name}: {measured.requests.failed} of {workload.requests} requests failed: {kinds}")
    wanted = workload.requests * workload.output_tokens
    if measured.tokens.output != wanted:
        raise Refused(
            f"{workload.name}: {measured.tokens.output} tokens came where {wanted} were asked for "
            f"(counted by the {measured.tokens.counted}): its `body` must say how it is made to go on"
        )
    _check_lengths(workload, measured)


def _check_lengths(workload: Workload, measured: Measured) -> None:
    """Raise Refused unless the prompts of the completed requests had about the length that was asked for."""
    if measured.tokens.counted != "server" or not measured.requests.completed:
        return  # usage lacks prompt lengths; the client derived them from the probes' usage
    if workload.input_range or workload.task == "rerank":  # drawn lengths; each document is read behind a query
        return
    read, asked = measured.tokens.input / measured.requests.completed, workload.input_tokens * workload.inputs
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
