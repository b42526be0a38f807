"""`infdctl bench`: measure an OpenAI-compatible endpoint under load."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, get_args

import click

from infd.admin.ctl import show
from infd.admin.ctl.client import Refused, TimedOut, Unreachable
from infd.loadgen.prompts import Kind

if TYPE_CHECKING:
    from infd.loadgen.figures import Report

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server, with or without /v1.")
@click.option("--model", default="", help="Name of the model. Default: the first that the server lists.")
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
@click.option("--requests", type=click.IntRange(min=1), default=64, show_default=True, help="Requests to measure.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Requests in flight at once. Default: 8; with --request-rate, as many as arrive.",
)
@click.option("--request-rate", type=_POSITIVE, metavar="PER_SECOND", help="Mean of random (Poisson) arrivals.")
@click.option("--input-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of a prompt.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Most to generate.")
@click.option("--prompts", type=click.Choice(get_args(Kind)), default="random", show_default=True)
@click.option("--shared", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Common part of prompts.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Default: the server's.")
@click.option("--ignore-eos", is_flag=True, help="Ask for --output-tokens tokens, wherever the model would stop.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Requests sent unmeasured.")
@click.option("--timeout", "timeout_s", type=_POSITIVE, default=600.0, show_default=True, help="Seconds a request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with a stable schema.")
def bench(as_json: bool, api_key_env: str | None, concurrency: int | None, **options: Any) -> None:
    """Measure a server: time to first token, token gaps, end-to-end time and throughput.

    Works with any OpenAI-compatible endpoint. Prompts are random words: with --prompts random no prompt hits the
    server's prefix cache, with --prompts shared-prefix all prompts share a prefix.
    """
    import asyncio  # only this command needs an event loop

    import uvloop

    from infd.loadgen.load import offer
    from infd.loadgen.settings import Settings
    from infd.loadgen.stream import RequestFailed

    if concurrency is None and options["request_rate"] is None:
        concurrency = 8
    settings = Settings(concurrency=concurrency, **options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(offer(settings, api_key=_key(api_key_env), notify=_notify))
    except RequestFailed as failure:
        if failure.kind == "unreachable":
            raise Unreachable(f"{failure}; is the server running, and is --url right?") from None
        if failure.kind == "timeout":
            raise TimedOut(f"no answer within {settings.timeout_s:g} s") from None
        advice = "; name the variable that holds the key with --api-key-env" if failure.status == 401 else ""
        raise Refused(f"{failure}{advice}") from None
    show.as_json(report) if as_json else _show(report)
    if report.requests.failed:
        raise Refused(f"{report.requests.failed} of {settings.requests} requests failed")


def _notify(text: str) -> None:
    click.echo(text, err=True)


def _key(name: str | None) -> str:
    if name is None:
        return ""
    if name not in os.environ:
        raise click.BadParameter(f"the environment has no variable {name}", param_hint="--api-key-env")
    return os.environ[name]


def _show(report: Report) -> None:
    done, rate, tokens = report.requests, report.throughput, report.tokens
    note = "" if tokens.counted == "server" else " (pieces of text: the server reports no usage)"
    show.table(
        (),
        [
            ("requests", f"{done.completed} done, {done.failed} failed in {report.duration_s:.1f} s"),
            *((f"  {kind}", str(count)) for kind, count in done.errors.items()),
            ("tokens", f"{tokens.input} in, {tokens.output} out{note}"),
            ("requests/s", f"{rate.requests_s:.2f}"),
            ("output tok/s", f"{rate.output_tokens_s:.1f}"),
            ("total tok/s", f"{rate.total_tokens_s:.1f}"),
        ],
    )
    click.echo()
    latency = report.latency_ms
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = {
        "first token": latency.ttft,
        "between tokens": latency.inter_token,
        "per output token": latency.per_token,
        "end to end": latency.e2e,
    }
    show.table(
        ("MS", *map(str.upper, columns)),
        [
            (name, *("-" if spread is None else f"{getattr(spread, column):.2f}" for column in columns))
            for name, spread in rows.items()
        ],
        right=tuple(map(str.upper, columns)),
    )
