"""`infdctl bench`: measure an OpenAI-compatible endpoint under load."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import click

from infd.admin.ctl import benchargs
from infd.admin.ctl.benchargs import POSITIVE, BenchCommand, Parsed, Several
from infd.admin.ctl.client import Refused, TimedOut, Unreachable
from infd.commandline import tls_options

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ssl import SSLContext

    from infd.admin.ctl.benchprogress import Progress
    from infd.loadgen.comparison import Judge
    from infd.loadgen.datasets.spec import File, Synthetic
    from infd.loadgen.figures import Report
    from infd.loadgen.record import Record
    from infd.loadgen.settings import Settings

_SHARED = 0.5


@click.command(cls=BenchCommand)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server, with or without /v1.")
@click.option("--model", default="", help="Name of the model. Default: the first that the server lists.")
@click.option(
    "--endpoint",
    type=Parsed("chat|completions", benchargs.endpoint, lambda: ("chat", "completions")),
    default="chat",
    show_default=True,
    help="API of the requests.",
)
@click.option(
    "--task",
    type=click.Choice(["generate", "embed", "classify", "rerank"]),
    default="generate",
    show_default=True,
    help="Operation to measure; all but generate use /v1/embeddings, /classify or /rerank, and have no output tokens.",
)
@click.option(
    "--inputs",
    type=click.IntRange(min=1, max=2048),
    default=1,
    show_default=True,
    help="Texts of a request that embeds or classifies, or documents of one that ranks; --input-tokens of each.",
)
@click.option("--api-key-env", metavar="NAME", help="Variable that holds the API key.  [INFD_API_KEY]")
@click.option("--header", type=Parsed("name=value", benchargs.pair), multiple=True, help="Header of every request.")
@tls_options
@click.option("--requests", type=click.IntRange(min=1), default=64, show_default=True, help="Requests to measure.")
@click.option(
    "--concurrency",
    type=Several(click.IntRange(min=1)),
    help="Most requests in flight; a list such as 1,2,4,8 measures each. Default: 8; with --request-rate or a trace, as"
    " many as arrive.",
)
@click.option(
    "--request-rate",
    type=Several(POSITIVE),
    metavar="PER_SECOND",
    help="Mean of random arrivals; a list such as 1,2,4 measures each.",
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Times that each load is measured, in turn. --compare needs 3 or more for a verdict.",
)
@click.option(
    "--burstiness",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Of arrivals: 1 is Poisson's, less comes in bursts, more is regular.",
)
@click.option(
    "--dataset",
    type=Parsed("name", benchargs.dataset, benchargs.datasets),
    help="random, shared-prefix, or the shape of --dataset-path: sharegpt, batch, prompts, mooncake, burstgpt. Default:"
    " random, or the shape that the file has.",
)
@click.option(
    "--dataset-path", type=click.Path(), metavar="FILE", help="Requests to send, as JSON, JSONL, CSV or text."
)
@click.option("--keep-order", is_flag=True, help="Send a file's requests in its order. A trace's are always.")
@click.option("--time-scale", type=POSITIVE, default=1.0, show_default=True, help="Factor of a trace's times.")
@click.option("--input-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of a prompt.")
@click.option(
    "--output-tokens",
    type=click.IntRange(min=1),
    help="Most to generate. Default: 128, or what the file says of each request.",
)
@click.option(
    "--range-ratio",
    type=Parsed("ratio", benchargs.ranges),
    default="0",
    help='Lengths vary by this part, up and down: 0.3, or {"input": 0.3, "output": 0}.',
)
@click.option("--shared", type=click.FloatRange(0, 1), help=f"Part of a prompt that is a prefix. Default: {_SHARED}.")
@click.option("--prefixes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of shared prefixes.")
@click.option(
    "--lora-modules", type=Parsed("name[=weight]", benchargs.weighted), multiple=True, help="Adapters to mix."
)
@click.option(
    "--lora-assignment", "assignment", type=click.Choice(["random", "round-robin"]), default="random", show_default=True
)
@click.option("--temperature", type=click.FloatRange(min=0), help="Default of this and the next six: the server's.")
@click.option("--top-p", type=click.FloatRange(0, 1))
@click.option("--top-k", type=int)
@click.option("--min-p", type=click.FloatRange(0, 1))
@click.option("--frequency-penalty", type=float)
@click.option("--presence-penalty", type=float)
@click.option("--repetition-penalty", type=float)
@click.option("--ignore-eos", is_flag=True, help="Ask for --output-tokens tokens, wherever the model would stop.")
@click.option("--schema", type=click.Path(), metavar="FILE", help="JSON schema that every answer has to fit.")
@click.option("--extra-body", type=Parsed("json", benchargs.json_object), help="Further fields of every request.")
@click.option(
    "--goodput",
    type=Parsed("name:ms", benchargs.objective),
    multiple=True,
    help="Objectives, such as ttft:200 tpot:50: count the requests that meet all. Names: ttft, tpot, itl, e2el.",
)
@click.option("--seed", type=int, help="Of prompts and arrivals. Default: another one each time.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Requests sent unmeasured.")
@click.option("--timeout", "timeout_s", type=POSITIVE, default=600.0, show_default=True, help="Seconds a request.")
@click.option(
    "--ready-timeout",
    "patience_s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Seconds to wait until the server is ready.",
)
@click.option("--no-progress", is_flag=True, help="No progress bar on a terminal.")
@click.option("--label", default="", help="Name of the measurement in the JSON, plots and comparisons.")
@click.option("--metadata", type=Parsed("name=value", benchargs.pair), multiple=True, help="Notes for the JSON.")
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write figures and every request's times as JSON, to standard output if no file is named.",
)
@click.option("--plot", metavar="FILE", help="Draw the measurement, or both of --compare, as one page of HTML.")
@click.option(
    "--compare",
    type=(str, str),
    metavar="BEFORE AFTER",
    help="Measure nothing; compare two files of --json, or two lists of files with commas between them, load"
    " by load: measure both with the same --concurrency or --request-rate. With --plot, draw both.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 0.999),
    default=0.99,
    show_default=True,
    help="From which --compare calls a change faster or slower, by the spread between runs.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Part by which a figure has to change beyond that spread.",
)
def bench(
    compare: tuple[str, str] | None,
    confidence: float,
    margin: float,
    plot: str | None,
    api_key_env: str | None,
    header: tuple[tuple[str, str], ...],
    tls: SSLContext | None,
    concurrency: list[int | None] | None,
    request_rate: list[float | None] | None,
    runs: int,
    patience_s: float,
    no_progress: bool,
    label: str,
    metadata: tuple[tuple[str, str], ...],
    json_path: str | None,
    **options: Any,
) -> None:
    """Measure a server: latencies, throughput, goodput; plot measurements, and compare two.

    Latencies are time to first token, token gaps, time per token and end-to-end time. Works with any OpenAI-compatible
    endpoint. Sends random prompts of exact lengths, or the requests of a file: ShareGPT's conversations, an OpenAI
    batch, prompts, Mooncake's or BurstGPT's traces. Ctrl-C ends a measurement early and prints what was measured. Takes
    the names of vLLM's `bench serve` too.
    """
    if compare is not None:
        from infd.loadgen.comparison import Judge

        _compare(compare, Judge(confidence, margin), json_path, plot)
        return
    import asyncio  # only this command needs an event loop

    import uvloop

    from infd.admin.ctl import benchview
    from infd.admin.ctl.benchprogress import Progress
    from infd.loadgen.datasets.call import DatasetError
    from infd.loadgen.record import Record, encode, write
    from infd.loadgen.stream import RequestFailed
    from infd.loadgen.sweep import sweep

    loads = sweep(_settings(options), concurrency or [], request_rate or [], runs)
    key = _key(api_key_env)
    reports: list[Report] = []
    ended: Exception | KeyboardInterrupt | None = None
    progress = Progress(len(loads), bar=not no_progress)
    connection = {"api_key": key, "headers": dict(header), "tls": tls, "patience_s": patience_s}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, progress:
            runner.run(_measure(loads, reports, progress, connection))
    except (RequestFailed, DatasetError, KeyboardInterrupt) as error:
        ended = error  # figures of loads measured before are shown first
    if reports:
        record = Record(label=label, metadata=dict(metadata), runs=reports)
        if json_path == "-":
            click.echo(encode(record), nl=False)
        else:
            benchview.show(reports)
            if json_path is not None:
                write(json_path, record)
        if plot is not None:
            _plot(plot, [record], [record.runs[0].model])
    _raise(ended, loads[0].timeout_s)
    if reports[-1].interrupted:
        raise KeyboardInterrupt
    failed = sum(report.requests.failed for report in reports)
    if failed:
        raise Refused(f"{failed} of {failed + sum(report.requests.completed for report in reports)} requests failed")


def _compare(names: tuple[str, str], judge: Judge, json_path: str | None, plot: str | None) -> None:
    import msgspec

    from infd.admin.ctl import benchview
    from infd.files import replace
    from infd.loadgen import comparison
    from infd.loadgen.record import Unreadable, read

    try:
        before, after = (comparison.merged([read(path) for path in name.split(",")], name) for name in names)
    except Unreadable as error:
        raise Refused(str(error)) from None
    found = comparison.compare(before, after, judge)
    written = msgspec.json.encode(found) + b"\n"
    if json_path == "-":
        click.echo(written, nl=False)
    else:
        benchview.compared(found)
        if json_path is not None:
            replace(json_path, written)
    if plot is not None:
        _plot(plot, [before, after], names)
    if not found.loads:
        raise Refused("the two have no load in common: measure both with the same --concurrency or --request-rate")


def _plot(path: str, records: Sequence[Record], names: Sequence[str]) -> None:
    from infd.files import replace
    from infd.loadgen.plot.page import page

    replace(path, page(records, names).encode())


async def _measure(
    loads: list[Settings], reports: list[Report], progress: Progress, connection: dict[str, Any]
) -> None:
    from infd.loadgen.load import connect

    async with connect(loads[0], observer=progress, **connection) as generator:
        for load in loads:
            progress.begin()
            reports.append(await generator.offer(load, keep_on_cancel=True))
            if reports[-1].interrupted:
                return


def _raise(ended: Exception | KeyboardInterrupt | None, timeout_s: float) -> None:
    """Raise the Failure, with its exit code, for the error that ended the measurement."""
    from infd.loadgen.stream import NO_TLS, RequestFailed

    if ended is None:
        return
    if not isinstance(ended, RequestFailed):
        raise ended if isinstance(ended, KeyboardInterrupt) else Refused(str(ended))
    if ended.kind == "unreachable":
        raise Unreachable(f"{ended}; is the server running, and is --url right?")
    if ended.kind == NO_TLS:
        raise Unreachable(str(ended))
    if ended.kind == "timeout":
        raise TimedOut(f"no answer within {timeout_s:g} s")
    advice = "; give a key in INFD_API_KEY, or name another variable with --api-key-env" if ended.status == 401 else ""
    raise Refused(f"{ended}{advice}")


def _settings(options: dict[str, Any]) -> Settings:
    from infd.loadgen.settings import SAMPLING, Settings

    body = {name: options[name] for name in SAMPLING if options[name] is not None}
    if options["ignore_eos"]:
        body["ignore_eos"] = True
    if options["schema"] is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _schema(options)}}
    return Settings(
        dataset=_file(options) if options["dataset_path"] is not None else _synthetic(options),
        models=dict(options["lora_modules"]),
        objectives_ms=dict(options["goodput"]),
        seed=secrets.randbelow(2**31) if options["seed"] is None else options["seed"],
        body=body | (options["extra_body"] or {}),
        **{name: options[name] for name in _COPIED},
    )


_COPIED = ("url", "model", "endpoint", "task", "inputs", "requests", "burstiness", "assignment", "warmup", "timeout_s")


def _synthetic(options: dict[str, Any]) -> Synthetic:
    from infd.loadgen.datasets.spec import DEFAULT_OUTPUT_TOKENS, Synthetic

    name = options["dataset"] or "random"
    if name not in {"random", "shared-prefix"}:
        raise click.UsageError(f"--dataset {name} needs --dataset-path FILE")
    if name == "random" and options["shared"] is not None:
        raise click.UsageError("--shared is of --dataset shared-prefix")
    before, after = options["range_ratio"]
    return Synthetic(
        input_tokens=options["input_tokens"],
        output_tokens=options["output_tokens"] or DEFAULT_OUTPUT_TOKENS,
        input_range=before,
        output_range=after,
        shared=0.0 if name == "random" else _SHARED if options["shared"] is None else options["shared"],
        prefixes=options["prefixes"],
    )


def _file(options: dict[str, Any]) -> File:
    from infd.loadgen.datasets.call import DatasetError
    from infd.loadgen.datasets.files import recognized
    from infd.loadgen.datasets.spec import File

    path, name = options["dataset_path"], options["dataset"]
    if name in {"random", "shared-prefix"}:
        raise click.UsageError(
            f"--dataset {name} makes its prompts; leave out --dataset-path, or name the file's shape"
        )
    try:
        shape = name or recognized(path)
    except DatasetError as error:
        raise Refused(str(error)) from None
    return File(
        path=path,
        shape=shape,
        output_tokens=options["output_tokens"],
        time_scale=options["time_scale"],
        shuffle=not options["keep_order"],
    )


def _schema(options: dict[str, Any]) -> dict[str, Any]:
    try:
        with open(options["schema"], encoding="utf-8") as file:
            return benchargs.json_object(file.read())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise click.BadParameter(f"{options['schema']}: {reason}", param_hint="--schema") from None


def _key(name: str | None) -> str:
    if name is None:
        return os.environ.get("INFD_API_KEY", "")
    if name not in os.environ:
        raise click.BadParameter(f"the environment has no variable {name}", param_hint="--api-key-env")
    return os.environ[name]
