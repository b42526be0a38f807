"""`infdctl drain`: stop the daemon, and say whether requests were cut off."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import Failure, Refused, TimedOut, Unreachable
from infd.admin.ctl.options import json_option, patience_options

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient

_POLL_S = 0.2
_LAST_EVENTS_S = 2.0  # the daemon sends the last events before it exits
_LIMIT = "server.drain_timeout_s"


class Drained(Struct):
    """JSON output of `drain`.

    exited   whether `drain` has waited until the daemon exited
    cut_off  requests that the daemon ended before they were finished; 0 without `exited`
    """

    pid: int
    running: int
    waiting: int
    exited: bool
    cut_off: int = 0


@click.command()
@patience_options("Return once the daemon has exited; exit code 1 if it cut requests off.")
@json_option
@click.pass_obj
def drain(client: AdminClient, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Stop the daemon: admit no more requests, finish the requests in flight, then exit, as on TERM.

    After server.drain_timeout_s the daemon cuts off the requests that are left, and exits with code 75; --timeout ends
    only this command. `infdctl config set server.drain_timeout_s=SECONDS` applies to the drain under way too.
    """
    news = _CutOff(client) if wait else None  # subscribes before the drain begins: a drain may end at once
    begun = client.post("/v1/drain", protocol.Draining)
    click.echo(f"draining: {begun.running} running, {begun.waiting} waiting", err=True)
    if news is not None:
        _wait_until_gone(client, begun.pid, timeout_s)
        news.finish()
    cut_off = 0 if news is None else news.requests
    if as_json:
        show.as_json(Drained(begun.pid, begun.running, begun.waiting, exited=wait, cut_off=cut_off))
    if news is not None and cut_off:
        raise Refused(f"drained, but {cut_off} request{'s were' if cut_off > 1 else ' was'} cut off{news.why}")


def _wait_until_gone(client: AdminClient, pid: int, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            now = client.get("/v1/status", protocol.Status)
            if now.pid != pid:  # a service manager has already started the next daemon
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(
                    f"still draining after {timeout_s:g} s ({now.running} running, {now.waiting} waiting;"
                    f" {_left(client, now)}); it goes on: wait again, see `infdctl ps`, or end requests with"
                    " `infdctl abort`"
                )
        except Unreachable:
            return
        time.sleep(_POLL_S)


def _left(client: AdminClient, now: protocol.Status) -> str:
    """Return when the daemon cuts requests off. Raises Failure."""
    limits = (row.value for row in client.get("/v1/config", protocol.Settings).settings if row.key == _LIMIT)
    passed_s = max(0.0, time.time() - now.since) if now.state == "draining" else 0.0
    return f"at most {max(0.0, next(limits) - passed_s):.0f} s more, by {_LIMIT}"


class _CutOff:
    """Learns from the daemon's events, on a thread of its own, how many requests were cut off.

    requests  their number
    why       the reason, behind "cut off"
    """

    def __init__(self, client: AdminClient) -> None:
        self.requests = 0
        self.why = ""
        self._client = client
        self._subscribed = Event()
        self._thread = Thread(target=self._run, name="events", daemon=True)
        self._thread.start()
        self._subscribed.wait()

    def finish(self) -> None:
        """Wait for the last events of a daemon that exits."""
        self._thread.join(_LAST_EVENTS_S)

    def _run(self) -> None:
        try:
            with self._client.subscribed("/v1/events?follow=true", protocol.Event) as events:
                self._subscribed.set()
                for event in events:
                    if event.kind == "request" and event.message == "cut off":
                        self.requests += int(event.facts["requests"] or 0)
                        after_s, reason = event.facts.get("after_s"), event.facts.get("reason")
                        timed_out = isinstance(after_s, int | float)
                        self.why = f" after {after_s:g} s ({_LIMIT})" if timed_out else f": {reason}"
        except Failure:
            pass  # an absent daemon fails `drain` itself; without events, the number of ended requests is not reported
        finally:
            self._subscribed.set()
