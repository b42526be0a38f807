"""`infdctl`: commands for the verbs and feeds of the admin socket, and `bench`.

Data goes to standard output, messages to standard error. Exit codes: 0 done,
1 refused or failed, 2 usage, 3 no daemon reached, 4 wrong state, 5 timed out.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.parse
from typing import TYPE_CHECKING, TypeVar

import click

from infd.admin import protocol
from infd.admin.ctl import lifecycle, loras, settings, show
from infd.admin.ctl.bench import bench
from infd.admin.ctl.client import AdminClient, Failure, TimedOut, Unreachable, WrongState
from infd.admin.ctl.drain import drain
from infd.admin.ctl.events import events
from infd.admin.ctl.logs import logs
from infd.admin.ctl.options import Ago, json_option
from infd.admin.ctl.top import top
from infd.commandline import Group, misused, unwritable
from infd.config import Environment
from infd.sockets.unix import accessible_to_others
from infd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

C = TypeVar("C", bound="Callable[..., None]")

_POLL_S = 0.2
_LEAST_PATIENCE_S = 1.0  # time limit of the last query of `wait`, even beyond --timeout


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `infdctl`, and exit with its exit code, or 130 if interrupted."""
    try:
        code: int | None = cli.main(arguments, prog_name="infdctl", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        click.echo(f"infdctl: {misused(error, 'infdctl')}", err=True)
        code = error.exit_code
    except OSError as error:
        click.echo(f"infdctl: {unwritable(error)}", err=True)
        code = 1
    except Failure as failure:
        click.echo(f"infdctl: {failure}", err=True)
        code = failure.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    sys.exit(code)


_STOP = "`infdctl drain` ends the daemon once its requests are finished, as `systemctl stop infd` does"
_LISTS = "`infdctl ps` lists requests, `infdctl loras` adapters, and `infd models` models"
_SHOWN = "`infdctl status` and `infdctl top` show the load, GET /metrics all counters"
_REJECTED = "`infdctl status` and `infdctl top` count rejected requests by reason, `infdctl logs` has each"
_INSTEAD = {
    **dict.fromkeys(("stop", "shutdown", "quit"), _STOP),
    **dict.fromkeys(("kill", "cancel"), "`infdctl abort ID` ends a request; `infdctl ps` lists the ids"),
    **dict.fromkeys(("list", "ls", "requests"), _LISTS),
    **dict.fromkeys(("slowest", "latency"), "`infdctl slow` lists the slowest requests that have ended"),
    **dict.fromkeys(("rejected", "rejects", "errors"), _REJECTED),
    **dict.fromkeys(("compare", "plot", "benchmark"), "`infdctl bench` measures; its --compare and --plot take files"),
    **dict.fromkeys(("tokens", "tenants", "keys", "quota"), "`infdctl usage` lists what keys and tenants have used"),
    **dict.fromkeys(("adapters", "lora"), "`infdctl loras`, `infdctl load-lora` and `infdctl unload-lora`"),
    **dict.fromkeys(("log", "journal", "trace"), "`infdctl logs -f` follows the log, with --request ID that of one"),
    **dict.fromkeys(("stats", "info", "metrics", "health"), _SHOWN),
    **dict.fromkeys(("get", "set"), "`infdctl config get` and `infdctl config set`"),
    "restart": "`systemctl restart infd`; while infd.socket is enabled no connection is refused meanwhile",
    "start": "`infd start` starts a daemon",
    "completion": "`infd completion SHELL` prints the script that completes both `infd` and `infdctl`",
    "tail": "`infdctl logs -f` follows the log",
    **dict.fromkeys(("log-level", "loglevel"), "`infdctl config set log.level=debug`"),
    "profile": "`infdctl top` shows the times of steps, `infdctl dump` stacks; there is no profile",
}


@click.group(
    cls=Group,
    instead=_INSTEAD,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--socket",
    "path",
    envvar="INFD_ADMIN_SOCKET",
    metavar="PATH",
    help="The daemon's admin socket, before or behind the command. Default: $INFD_ADMIN_SOCKET, else admin.sock in"
    " $XDG_RUNTIME_DIR/infd, else /tmp/infd-UID, else /run/infd.",
)
@click.version_option(__version__, prog_name="infdctl", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context, path: str | None) -> None:
    """Administer a running infd.

    Exit codes: 0 done, 1 refused or failed, 2 usage, 3 no daemon reached, 4 wrong state, 5 timed out.
    """
    context.obj = AdminClient([path] if path else list(_usual_places()))


def _usual_places() -> Iterator[str]:
    environment = Environment.read(os.environ, pid=os.getpid(), uid=os.geteuid())
    for directory in environment.runtime:
        if directory != environment.private or not accessible_to_others(directory):
            yield str(directory / "admin.sock")


@cli.command()
@json_option
@click.pass_obj
def status(client: AdminClient, as_json: bool) -> None:
    """Show state, load, cache, and how many requests were rejected, by reason.

    The log has each rejected request with its error: `infdctl logs`. GET /metrics counts them over time.
    """
    answer = client.get("/v1/status", protocol.Status)
    show.as_json(answer) if as_json else show.status(answer)


@cli.command()
@json_option
@click.pass_obj
def version(client: AdminClient, as_json: bool) -> None:
    """Show the versions of infdctl and of the daemon."""
    daemon = client.get("/version", protocol.Version)
    if as_json:
        show.as_json(daemon)
        return
    click.echo(f"infdctl {__version__}, daemon {daemon.version}")


@cli.command("wait")
@click.argument("state", type=click.Choice([state for state in protocol.STATES if state != "starting"]))
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, max=1e9), metavar="SECONDS", help="Wait at most this long."
)
@json_option
@click.pass_obj
def wait_(client: AdminClient, state: str, timeout_s: float | None, as_json: bool) -> None:
    """Wait until the daemon is in STATE, such as ready, also if it is not started yet.

    Exit codes: 4 if the daemon failed, or ended while it was starting; 5 after --timeout. Without --timeout it waits
    until a daemon comes.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    reported: set[str] = set()
    starting = False
    while True:
        now: protocol.Status | None = None
        patience_s = None if deadline is None else max(deadline - time.monotonic(), _LEAST_PATIENCE_S)
        try:
            now = client.get("/v1/status", protocol.Status, timeout_s=patience_s)
        except TimedOut:
            seen = "the daemon does not answer yet"
        except Unreachable as error:
            if starting:
                raise WrongState("the daemon ended while it was starting; its log says why") from error
            seen = str(error)
        if now is not None:
            starting = now.state == "starting"
            seen = f"the daemon is {now.state}{f' ({now.reason})' if now.reason else ''}"
            if now.state == state:
                break
            if now.state == "failed":
                raise WrongState(seen)
        if deadline is not None and time.monotonic() >= deadline:
            raise TimedOut(f"not {state} after {timeout_s:g} s: {seen}")
        if seen not in reported:
            click.echo(f"infdctl: waiting: {seen}", err=True)
            reported.add(seen)
        time.sleep(_POLL_S)
    if as_json:
        show.as_json(now)


@cli.command()
@json_option
@click.pass_obj
def ps(client: AdminClient, as_json: bool) -> None:
    """List waiting and running requests."""
    answer = client.get("/v1/requests", protocol.Requests)
    show.as_json(answer) if as_json else show.requests(answer.requests)


@cli.command()
@click.option(
    "--by",
    type=click.Choice(["total", "ttft", "queue"]),
    default="total",
    show_default=True,
    help="total: the whole answer; ttft: until the first token; queue: until the first step.",
)
@click.option("--since", type=Ago(), metavar="TIME", help="Only those that ended since: 90s, 5m, 2h ago. At most 6h.")
@json_option
@click.pass_obj
def slow(client: AdminClient, by: str, since: timedelta | None, as_json: bool) -> None:
    """List the slowest requests that have ended, with the times of their stages and the likely cause.

    At most 20, of the last six hours of this daemon. Times begin at the request's arrival. `infdctl ps` lists the
    requests that have not ended; log.slow_s makes the daemon log slow requests as they end. CAUSE names the stage that
    took the largest share of the time that --by compares, and each other stage above a third of it.
    """
    within = "" if since is None else f"&within_s={since.total_seconds():.0f}"
    answer = client.get(f"/v1/slow?by={by}{within}", protocol.SlowRequests)
    show.as_json(answer) if as_json else show.slow(answer, by)


@cli.command()
@json_option
@click.pass_obj
def usage(client: AdminClient, as_json: bool) -> None:
    """List what each API key and each tenant has used since the daemon started: requests and tokens.

    Only inference requests count: for generated text, embeddings, labels and scores. LIMITED are those of REQUESTS that
    were refused because a rate was used up. REFUSED are those refused because of load or the daemon's state, such as
    queue_full and key_in_flight; `infdctl status` counts all refusals by reason.

    A tenant's sums are those of its present keys. For a day or an hour, take the difference of two outputs, or the
    increase of the metrics infd_key_*.
    """
    answer = client.get("/v1/usage", protocol.UsageRows)
    show.as_json(answer) if as_json else show.usage(answer)


@cli.command()
@click.argument("request_id", metavar="ID")
@json_option
@click.pass_obj
def abort(client: AdminClient, request_id: str, as_json: bool) -> None:
    """End request ID; its client gets finish_reason "abort"."""
    answer = client.post(f"/v1/requests/{urllib.parse.quote(request_id, safe='')}/abort", protocol.Aborted)
    show.as_json(answer) if as_json else click.echo(f"aborted {answer.id}", err=True)


@cli.command()
@json_option
@click.pass_obj
def ops(client: AdminClient, as_json: bool) -> None:
    """Show the kernel chosen for each family, and the refused kernels with reasons."""
    answer = client.get("/v1/ops", protocol.Ops)
    show.as_json(answer) if as_json else show.ops(answer)


@cli.command()
@json_option
@click.pass_obj
def experts(client: AdminClient, as_json: bool) -> None:
    """Show how evenly tokens choose the experts of each layer."""
    answer = client.get("/v1/experts", protocol.Experts)
    show.as_json(answer) if as_json else show.experts(answer)


@cli.command()
@json_option
@click.pass_obj
def dump(client: AdminClient, as_json: bool) -> None:
    """Print the stacks of the daemon's tasks and threads."""
    answer = client.get("/v1/dump", protocol.Dump)
    show.as_json(answer) if as_json else show.dump(answer)


for command in (
    bench,
    events,
    top,
    logs,
    drain,
    lifecycle.pause,
    lifecycle.resume,
    lifecycle.sleep,
    lifecycle.wake,
    lifecycle.load_weights,
    lifecycle.reset_prefix_cache,
    loras.loras,
    loras.load_lora,
    loras.unload_lora,
    settings.reload,
    settings.config,
):
    cli.add_command(command)


def _name_socket(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if path is not None:
        context.obj = AdminClient([path])


def _add_socket_option(group: click.Group) -> None:
    """Accept --socket behind the group's commands too; help texts and man page have it once."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            _add_socket_option(command)
        elif command is not bench:  # speaks HTTP with any server
            option = click.Option(["--socket"], hidden=True, expose_value=False, callback=_name_socket)
            command.params.append(option)


_add_socket_option(cli)
