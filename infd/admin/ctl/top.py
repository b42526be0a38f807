"""`infdctl top`: a live view of the daemon, fed by frames of the admin socket."""

from __future__ import annotations

import sys
import time
import urllib.parse
from threading import Thread
from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import Failure, TimedOut, Unreachable
from infd.admin.ctl.options import json_option
from infd.admin.items import Frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.admin.ctl.client import AdminClient
    from infd.admin.ctl.terminal import Terminal
    from infd.admin.ctl.topview import Action, View

_RETRY_S = 1.0
_REDRAW_S = 1.0


@click.command()
@click.option(
    "--interval",
    "-d",
    "interval_s",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between frames.",
)
@click.option("--once", is_flag=True, help="Print one frame and exit, as without a terminal.")
@json_option
@click.pass_obj
def top(client: AdminClient, interval_s: float, once: bool, as_json: bool) -> None:
    """Show the daemon live: load, latencies, cache, process, and a row for each request.

    Percentiles and ratios cover the last 30 seconds, rates the last 5. Percentiles are at most 5 % off. With --json
    each frame is a line. While the daemon is gone the view waits for it. In the view, h lists the keys.
    """
    once = once or not (as_json or sys.stdout.isatty())
    path = f"/v1/top?interval_s={interval_s}{'&frames=1' if once else ''}"
    if as_json:
        for frame in client.read(path, Frame):
            show.as_line(frame)
    elif once:
        _print(next(client.read(path, Frame)))
    else:
        client.get("/version", protocol.Version)  # raises Unreachable before the screen changes
        _watch(client, path)


def _print(frame: Frame) -> None:
    import shutil

    from rich.console import Console

    from infd.admin.ctl.topview import View

    view = View()
    view.show(frame)
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    console = Console(width=width, highlight=False)
    for line in view.draw(width):
        with console.capture() as drawn:
            console.print(line, soft_wrap=True, end="")
        click.echo(drawn.get().rstrip(), color=True)


def _watch(client: AdminClient, path: str) -> None:
    from infd.admin.ctl.terminal import Terminal
    from infd.admin.ctl.topview import View

    view = View()
    with Terminal() as terminal:
        frames = _Frames(client, path, terminal.wake)
        while True:
            frames.show_in(view)
            width, height = terminal.size
            terminal.draw(view.draw(width, height))
            for key in terminal.keys(_REDRAW_S):
                action = view.press(key)
                if action is not None:
                    if action.kind == "quit":
                        return
                    _perform(client, action, view, terminal)


def _perform(client: AdminClient, action: Action, view: View, terminal: Terminal) -> None:
    """Ask the daemon for `action`, and note its answer in the view."""
    view.note = f"{action.kind} {action.id}".strip() + " ..."
    width, height = terminal.size
    terminal.draw(view.draw(width, height))
    try:
        if action.kind == "abort":
            client.post(f"/v1/requests/{urllib.parse.quote(action.id, safe='')}/abort", protocol.Aborted)
            view.note = f"aborted {action.id}"
        else:
            done = client.post(f"/v1/{action.kind}", protocol.TransitionResult, {"wait_s": 0.0})
            view.note = f"{action.kind}: the daemon is {done.state}"
    except Failure as failure:
        view.note = str(failure)


class _Frames:
    """Reads frames on a thread of its own, and again after the daemon was gone.

    wake  called when a frame or a failure is new
    """

    def __init__(self, client: AdminClient, path: str, wake: Callable[[], None]) -> None:
        self._client = client
        self._path = path
        self._wake = wake
        self._latest: Frame | None = None
        self._lost = ""
        self._failure: Exception | None = None
        Thread(target=self._run, name="frames", daemon=True).start()

    def show_in(self, view: View) -> None:
        """Show the latest frame, or the reason that there is none. Raises Failure if the daemon refuses."""
        if self._failure is not None:
            raise self._failure
        latest, self._latest = self._latest, None
        if latest is not None:
            view.show(latest)
        view.lost = self._lost

    def _run(self) -> None:
        while True:
            try:
                for frame in self._client.read(self._path, Frame):
                    self._latest, self._lost = frame, ""
                    self._wake()
                self._lost = "the daemon has ended; waiting for the next one"
            except (Unreachable, TimedOut) as failure:
                self._lost = f"the daemon has gone; waiting for it: {failure}"
            except Exception as failure:  # raised by show_in, on the main thread
                self._failure = failure
                self._wake()
                return
            self._wake()
            time.sleep(_RETRY_S)
