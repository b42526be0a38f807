"""`infdctl top` on a terminal: a pseudo-terminal, a process, a daemon's socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from infd.admin.ctl import terminal as terminal_of_ctl
from tests.admin.test_ctl import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.admin.conftest import AdminEngine

PROGRAM = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from infd.admin.ctl import main; main()"
COLOR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7])m")
RESTORED = b"\x1b[?25h\x1b[?1049l"  # shows the cursor, leaves the other screen


class Terminal:
    """infdctl top on a pseudo-terminal of 80 columns. `seen`: all that it wrote."""

    def __init__(self, socket: Path, **environment: str) -> None:
        self._ours, self._theirs = os.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = self.modes_now
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--socket", str(socket), "top", "--interval", "0.1"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", **environment},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )
        os.set_blocking(self._ours, False)

    @property
    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    async def until(self, text: str) -> None:
        """Wait until `text` was written since the last call."""
        begin = len(self.seen)
        while text.encode() not in self.seen[begin:]:
            assert self.process.poll() is None, self.seen
            await self._read()

    async def ended(self) -> int:
        while self.process.poll() is None:
            await self._read()
        await self._read()
        return self.process.returncode

    async def _read(self) -> None:
        await asyncio.sleep(0.005)
        try:
            self.seen += os.read(self._ours, 2**16)
        except BlockingIOError:
            return

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@contextmanager
def terminal(socket: Path, **environment: str) -> Iterator[Terminal]:
    opened = Terminal(socket, **environment)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize(("end", "code"), [("q", 0), ("\x03", 130), (signal.SIGTERM, 143)], ids=["q", "Ctrl-C", "TERM"])
async def test_the_terminal_is_restored(backend: AdminEngine, end: str | signal.Signals, code: int) -> None:
    with terminal(backend.socket) as shown:
        await shown.until("cache pages")
        assert shown.modes_now != shown.modes
        shown.process.send_signal(end) if isinstance(end, signal.Signals) else shown.press(end)

        assert await shown.ended() == code
        assert shown.seen.rstrip().endswith(RESTORED)
        assert shown.modes_now == shown.modes
        assert COLOR.search(shown.seen)


async def test_keys_abort_the_selected_request(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (request_id, choices):
        with terminal(backend.socket, NO_COLOR="1") as shown:
            await shown.until(request_id[:16])
            shown.press("ja")
            await shown.until(f"abort {request_id}?")
            shown.press("y")
            await shown.until(f"aborted {request_id}")
            assert [delta.finish is not None async for _, delta in choices] == [True]
            assert not COLOR.search(shown.seen), "NO_COLOR"


async def test_it_waits_for_a_daemon_that_has_gone(backend: AdminEngine) -> None:
    with terminal(backend.socket) as shown:
        await shown.until("starting")
        await backend.admin.close()
        await shown.until("waiting for")
        backend.admin = backend.server()
        await backend.admin.start(backend.socket)
        async with backend.loaded():
            await shown.until("ready")
            assert shown.process.poll() is None
        shown.press("q")
        assert await shown.ended() == 0


async def test_without_a_daemon_the_screen_stays_as_it_is(tmp_path: Path) -> None:
    with terminal(tmp_path / "absent.sock") as shown:
        assert await shown.ended() == 3
        assert b"no daemon" in shown.seen
        assert b"\x1b[?1049h" not in shown.seen


def test_a_signal_ends_the_view_although_a_finalizer_was_running(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: dropped.append(each.exc_type))
    with terminal_of_ctl.Terminal() as shown:
        Finalized()
        assert dropped == [SystemExit]
        with pytest.raises(SystemExit) as ended:
            shown.keys(0)
    assert ended.value.code == 130
