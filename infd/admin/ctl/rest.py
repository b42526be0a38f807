"""`infdctl pause | resume | reset-prefix-cache`: bring the daemon to rest and back, and let it forget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import TimedOut
from infd.admin.ctl.options import json_option, patience_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.admin.ctl.client import AdminClient

AT_ONCE_S = 1.0  # what comes true within this is reported as done; the rest goes on by itself

waiting = patience_options("Return once it is done, not after a second at most.")


@click.command()
@click.option(
    "--mode",
    type=click.Choice(["abort", "wait", "keep"]),
    default="wait",
    show_default=True,
    help="What becomes of requests in flight: they end, finish first, or stay where they are.",
)
@click.option(
    "--new",
    type=click.Choice(["hold", "reject"]),
    default="hold",
    show_default=True,
    help="What new requests get: a wait, within the queue's bounds and server.hold_timeout_s, or 503.",
)
@waiting
@json_option
@click.pass_obj
def pause(client: AdminClient, mode: str, new: str, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Let no step run until a resume. With --mode keep, resume goes on token for token."""
    asked = {"mode": mode, "new": new}
    _move(client, "pause", asked, wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@waiting
@json_option
@click.pass_obj
def resume(client: AdminClient, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Be ready again."""
    _move(client, "resume", {}, wait=wait, timeout_s=timeout_s, as_json=as_json)


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


def _progress(verb: str, now: protocol.Moved) -> str:
    counts = {"aborted": now.aborted, "frozen": now.frozen, "held": now.held}
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    if now.done:
        return f"{now.state}{f': {said}' if said else ''}"
    return f"{now.state}, {verb} goes on: {now.running} running, {now.waiting} waiting"
