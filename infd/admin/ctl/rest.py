"""`infdctl pause | resume | sleep | wake | load-weights | reset-prefix-cache`: rest, memory, and what is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import TimedOut
from infd.admin.ctl.options import json_option, patience_options
from infd.memory import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.admin.ctl.client import AdminClient

PARTS = tuple(part.value for part in Part)
AT_ONCE_S = 1.0  # what comes true within this is reported as done; the rest goes on by itself

waiting = patience_options("Return once it is done, not after a second at most.")


modes = click.option(
    "--mode",
    type=click.Choice(["abort", "wait", "keep"]),
    default="wait",
    show_default=True,
    help="What becomes of requests in flight: they end, finish first, or stay where they are.",
)


@click.command()
@modes
@click.option(
    "--new",
    type=click.Choice(["hold", "reject"]),
    help="What new requests get: a wait, within the queue's bounds and server.hold_timeout_s, or 503."
    " Default: hold; with --mode abort reject.",
)
@waiting
@json_option
@click.pass_obj
def pause(client: AdminClient, mode: str, new: str | None, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Let no step run until a resume. With --mode keep, resume goes on token for token."""
    _move(client, "pause", {"mode": mode, "new": new}, wait=wait, timeout_s=timeout_s, as_json=as_json)


tags = click.option(
    "--tags",
    metavar="weights,kv_cache",
    help="Take only this back into memory, and sleep on until the rest is back too.",
)


@click.command()
@tags
@waiting
@json_option
@click.pass_obj
def resume(client: AdminClient, tags: str | None, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Be ready again, awake if it slept."""
    _move(client, "resume", {"tags": _parts(tags)}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@modes
@click.option(
    "--level",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="1: give the cache's memory back; a GPU's weights move to the host. 2: the weights' too; they are read again"
    " from disk.",
)
@waiting
@json_option
@click.pass_obj
def sleep(client: AdminClient, mode: str, level: int, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Let no step run, and give memory back to the system. What --mode keep keeps is computed anew later."""
    _move(client, "sleep", {"mode": mode, "level": level}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@tags
@waiting
@json_option
@click.pass_obj
def wake(client: AdminClient, tags: str | None, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Take memory back and be again what it was before it slept: ready, or paused."""
    _move(client, "wake", {"tags": _parts(tags)}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@click.argument("path", type=click.Path())
@waiting
@json_option
@click.pass_obj
def load_weights(client: AdminClient, path: str, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Put the weights of the checkpoint in directory PATH in place of those served, while infd is paused or asleep.

    PATH lies beneath model.weights_root, by default beside the model's own directory, and must hold the same tensors
    in the same shapes. Cached prefixes are forgotten; what is frozen goes on with what it holds, unless `infdctl
    reset-prefix-cache --running` follows.
    """
    _move(client, "load-weights", {"path": path}, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@click.option("--running", is_flag=True, help="Also compute anew what runs, from its first token.")
@json_option
@click.pass_obj
def reset_prefix_cache(client: AdminClient, running: bool, as_json: bool) -> None:
    """Forget the cached prefixes of earlier prompts."""
    done = client.post("/v1/reset-prefix-cache", protocol.PrefixCacheReset, {"running": running})
    click.echo(f"{done.pages} pages forgotten, {done.preempted} choices computed anew", err=True)
    if as_json:
        show.as_json(done)


def _move(
    client: AdminClient, verb: str, asked: Mapping[str, object], *, wait: bool, timeout_s: float | None, as_json: bool
) -> None:
    """Ask for it and show what has come of it. Raises TimedOut."""
    now = client.post(
        f"/v1/{verb}",
        protocol.Moved,
        {**asked, "wait_s": timeout_s if wait else AT_ONCE_S},
        patient=True,
    )
    click.echo(f"{_progress(verb, now)}{f' ({now.reason})' if now.reason else ''}", err=True)
    if wait and not now.done:
        raise TimedOut(f"{verb} is not done after {timeout_s:g} s; it goes on: wait again, or see `infdctl status`")
    if as_json:
        show.as_json(now)


def _parts(tags: str | None) -> list[str] | None:
    """Raises click.UsageError."""
    if tags is None:
        return None
    parts = [tag.strip() for tag in tags.split(",")]
    if unknown := [part for part in parts if part not in PARTS]:
        raise click.UsageError(f"--tags takes {' and '.join(PARTS)}, not {unknown[0]!r}")
    return parts


def _progress(verb: str, now: protocol.Moved) -> str:
    counts = {"aborted": now.aborted, "frozen": now.frozen, "held": now.held}
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if now.freed_bytes:
        said = ", ".join(filter(None, [said, f"{now.freed_bytes / 2**20:,.0f} MiB given back"]))
    if now.done:
        news = f"weights {now.weights}, " if verb == "load-weights" else ""
        return f"{news}{now.state}{f': {said}' if said else ''}"
    return f"{now.state}, {verb} goes on: {now.running} running, {now.waiting} waiting"
