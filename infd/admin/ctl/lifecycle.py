"""`infdctl pause | resume | sleep | wake | load-weights | reset-prefix-cache`: lifecycle, weights and cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import TimedOut
from infd.admin.ctl.options import json_option, patience_options
from infd.memory import MemoryPart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.admin.ctl.client import AdminClient

TAGS = tuple(part.value for part in MemoryPart)
WITHOUT_WAIT_S = 1.0  # wait of a command without --wait, long enough for most transitions

waiting = patience_options("Return once the transition is done; without --wait, after a second at most.")


modes = click.option(
    "--mode",
    type=click.Choice(["abort", "wait", "keep"]),
    default="wait",
    show_default=True,
    help="Requests in flight: abort them, wait until they finish, or keep them frozen.",
)


@click.command()
@modes
@click.option(
    "--new",
    type=click.Choice(["hold", "reject"]),
    help="New requests: hold them, within the queue's bounds and server.hold_timeout_s, or reject them with 503."
    " Default: hold; with --mode abort, reject.",
)
@waiting
@json_option
@click.pass_obj
def pause(client: AdminClient, mode: str, new: str | None, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Stop steps until resume. With --mode keep, frozen requests continue then where they stopped.

    A sleeping daemon wakes first.
    """
    _transition(client, "pause", {"mode": mode, "new": new}, wait=wait, timeout_s=timeout_s, as_json=as_json)


tags = click.option(
    "--tags",
    metavar="weights,kv_cache",
    help="Restore only these parts of memory; the daemon sleeps until all are restored.",
)


@click.command()
@tags
@waiting
@json_option
@click.pass_obj
def resume(client: AdminClient, tags: str | None, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Make the daemon ready again; a sleeping daemon wakes first."""
    _transition(client, "resume", {"tags": _tags(tags)}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@modes
@click.option(
    "--level",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="1: release the cache; a GPU's weights move to host memory. 2: release the weights too; wake reads them"
    " from disk.",
)
@waiting
@json_option
@click.pass_obj
def sleep(client: AdminClient, mode: str, level: int, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Stop steps and release memory. Requests frozen by --mode keep are recomputed after wake."""
    _transition(client, "sleep", {"mode": mode, "level": level}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@tags
@waiting
@json_option
@click.pass_obj
def wake(client: AdminClient, tags: str | None, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Restore memory, and return to the state before sleep: ready or paused."""
    _transition(client, "wake", {"tags": _tags(tags)}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@click.argument("path", type=click.Path())
@waiting
@json_option
@click.pass_obj
def load_weights(client: AdminClient, path: str, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Replace the served weights by the checkpoint in directory PATH, while infd is paused or asleep.

    PATH must be beneath model.weights_root (by default the parent of the model's directory). Its tensors must have the
    names and shapes of the served tensors. infd drops cached prefixes; frozen requests keep their cached tokens unless
    `infdctl reset-prefix-cache --running` follows.
    """
    _transition(client, "load-weights", {"path": path}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@click.option("--running", is_flag=True, help="Also recompute running requests from their first token.")
@json_option
@click.pass_obj
def reset_prefix_cache(client: AdminClient, running: bool, as_json: bool) -> None:
    """Drop the cached prefixes of earlier prompts."""
    done = client.post("/v1/reset-prefix-cache", protocol.PrefixCacheReset, {"running": running})
    click.echo(f"{done.pages} pages forgotten, {done.preempted} choices computed anew", err=True)
    if as_json:
        show.as_json(done)


def _transition(
    client: AdminClient,
    verb: str,
    arguments: Mapping[str, object],
    *,
    wait: bool,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Call a lifecycle verb and show its result. Raises TimedOut."""
    now = client.post(
        f"/v1/{verb}",
        protocol.TransitionResult,
        {**arguments, "wait_s": timeout_s if wait else WITHOUT_WAIT_S},
        patient=True,
    )
    click.echo(f"{_progress(verb, now)}{f' ({now.reason})' if now.reason else ''}", err=True)
    if wait and not now.done:
        raise TimedOut(f"{verb} is not done after {timeout_s:g} s; it goes on: wait again, or see `infdctl status`")
    if as_json:
        show.as_json(now)


def _tags(tags: str | None) -> list[str] | None:
    """Split `--tags`. Raises click.UsageError on an unknown tag."""
    if tags is None:
        return None
    names = [tag.strip() for tag in tags.split(",")]
    if unknown := [name for name in names if name not in TAGS]:
        raise click.UsageError(f"--tags takes {' and '.join(TAGS)}, not {unknown[0]!r}")
    return names


def _progress(verb: str, now: protocol.TransitionResult) -> str:
    counts = {"aborted": now.aborted, "frozen": now.frozen, "held": now.held}
    details = [f"{count} {name}" for name, count in counts.items() if count]
    if now.freed_bytes:
        details.append(f"{now.freed_bytes / 2**20:,.0f} MiB given back")
    if now.done:
        weights = f"weights {now.weights}, " if verb == "load-weights" else ""
        return f"{weights}{now.state}{': ' if details else ''}{', '.join(details)}"
    return f"{now.state}, {verb} goes on: {now.running} running, {now.waiting} waiting"
