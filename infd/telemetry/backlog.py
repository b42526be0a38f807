"""What waits to be written while its reader is slow, so that whoever says it need not wait.

A reader may stall: a pipe that nobody empties, a terminal that was stopped. Then
the backlog grows to its limit, and what comes after is dropped and counted.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from threading import Condition, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES: Final = 16 * 2**20  # QUIT's stacks of some thousand tasks fit
FLUSH_S: Final = 0.5  # of the 2 s within which INT promises the end


def gap_record(lines: int) -> logging.LogRecord:
    """Return the record that stands for so many lost ones."""
    fields = {"name": "infd.log", "levelno": logging.WARNING, "levelname": "WARNING", "dropped": lines}
    return logging.makeLogRecord({**fields, "msg": "lines were lost: the log's reader did not keep up"})


class Backlog:
    """Writes in order on a thread of its own, which nobody need wait for at exit.

    write  may block, and may raise OSError: then the bytes are lost
    gap    what stands in the place of so many dropped pieces
    """

    def __init__(
        self, write: Callable[[bytes], None], gap: Callable[[int], bytes], most_bytes: int = MOST_BYTES
    ) -> None:
        self._write = write
        self._gap = gap
        self._most_bytes = most_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # of those that wait, and of the one being written
        self._dropped = 0  # since the last one taken
        self._changed = Condition()
        Thread(target=self._run, name="infd-log", daemon=True).start()

    def put(self, piece: bytes) -> None:
        """Write it soon, or drop it. Never blocks."""
        with self._changed:
            if self._bytes + len(piece) > self._most_bytes:
                self._dropped += 1
                return
            self._tell_gap()
            self._append(piece)

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is written, but not for ever. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes and not self._dropped, timeout_s)

    def _run(self) -> None:
        while True:
            piece = self._next()
            with suppress(OSError):  # its reader is gone or the disk is full; there is no other place to say so
                self._write(piece)
            with self._changed:
                self._bytes -= len(piece)
                self._changed.notify_all()

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._dropped)
            if not self._waiting:
                self._tell_gap()
            return self._waiting.popleft()

    def _tell_gap(self) -> None:
        if self._dropped:
            self._append(self._gap(self._dropped))
            self._dropped = 0

    def _append(self, piece: bytes) -> None:
        self._waiting.append(piece)
        self._bytes += len(piece)
        self._changed.notify_all()
