"""A terminal that shows one screen and reads keys, and is restored however the program ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

_SEQUENCES = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down"}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """The terminal of standard output; keys come from standard input if that is a terminal.

    Within a `with` block the other screen is shown. INT, TERM and HUP end the program, Ctrl-Z suspends it; before, and
    at the block's end, the terminal is restored.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] | None = None
        self._live: Live | None = None
        self._woken, self._waker = os.pipe()
        self._handlers: dict[signal.Signals, Any] = {}
        self._ended: SystemExit | None = None

    def __enter__(self) -> Self:
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        for number in _ENDING:
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: self.wake())
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        for ending in _ENDING:  # a second TERM must not interrupt the restoring
            signal.signal(ending, signal.SIG_IGN)
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return self._console.size

    def draw(self, lines: Sequence[Text]) -> None:
        if self._live is not None:
            self._live.update(Group(*lines), refresh=True)

    def keys(self, timeout_s: float) -> list[str]:
        """Wait until keys were pressed, `wake` was called or the time is over. Return the keys."""
        if self._ended is not None:
            raise self._ended
        waited = [self._woken, *([self._keyboard] if self._keyboard is not None else [])]
        ready, _, _ = select.select(waited, [], [], timeout_s)
        if self._woken in ready:
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)
        if self._keyboard is None or self._keyboard not in ready:
            return []
        pressed = os.read(self._keyboard, 256)
        if not pressed:  # the other end has hung up
            self._keyboard = None
        return decode(pressed)

    def wake(self) -> None:
        """End `keys`. May be called on any thread."""
        with suppress(BlockingIOError):  # so much waits already that `keys` returns
            os.write(self._waker, b"\0")

    def _open(self) -> None:
        if self._keyboard is not None:
            self._modes = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)
        live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live = live
        live.start()

    def _restore(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with suppress(OSError):  # the terminal has gone
                live.stop()
        if self._keyboard is not None and self._modes is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._modes)
        self._modes = None

    def _end(self, number: int, frame: object) -> None:
        self._ended = SystemExit(128 + number)
        raise self._ended  # Python drops it if a finalizer is running; then `keys` raises it

    def _suspend(self, number: int, frame: object) -> None:
        self._restore()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here the process is stopped until the shell continues it.
        signal.signal(signal.SIGTSTP, handler)
        self._open()
        self.wake()


def decode(pressed: bytes) -> list[str]:
    """Return the keys of a terminal's bytes: characters, `up` and `down`. Other sequences are left out."""
    keys = []
    while pressed:
        if pressed[:1] != b"\x1b":
            keys.append(chr(pressed[0]))
            pressed = pressed[1:]
            continue
        end = next((at for at in range(2, len(pressed)) if 0x40 <= pressed[at] <= 0x7E), len(pressed) - 1) + 1
        if pressed[:end] in _SEQUENCES:
            keys.append(_SEQUENCES[pressed[:end]])
        pressed = pressed[end:]
    return keys
