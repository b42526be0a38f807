"""A queue of log output for a reader that may be slow, so that logging never blocks.

While the reader stalls (a full pipe, a stopped terminal), the queue grows up to a
limit; further output is dropped and counted.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from threading import Condition, Thread
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_BYTES: Final = 16 * 2**20  # enough for the stacks of a thousand tasks, which SIGQUIT logs
FLUSH_S: Final = 0.5  # less than the 2 s within which the daemon exits after SIGINT


def gap_record(lines: int) -> logging.LogRecord:
    """Return the record that reports the number of dropped lines."""
    fields = {"name": "infd.log", "levelno": logging.WARNING, "levelname": "WARNING", "dropped": lines}
    return logging.makeLogRecord({**fields, "msg": "lines were lost: the log's reader did not keep up"})


class Backlog:
    """A queue of pieces of output, which a daemon thread writes in order; the thread is not joined at exit.

    write  writes one piece; may block; a piece whose write raises OSError is lost
    gap    returns the piece that reports a number of dropped pieces
    """

    def __init__(
        self, write: Callable[[bytes], None], gap: Callable[[int], bytes], most_bytes: int = MOST_BYTES
    ) -> None:
        self._write = write
        self._gap = gap
        self._most_bytes = most_bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # size of the pieces queued or being written
        self._dropped = 0  # number of pieces dropped since the last piece was queued
        self._changed = Condition()
        Thread(target=self._run, name="infd-log", daemon=True).start()

    def put(self, piece: bytes) -> None:
        """Queue a piece, or drop it. Never blocks."""
        with self._changed:
            if self._bytes + len(piece) > self._most_bytes:
                self._dropped += 1
                return
            self._report_gap()
            self._append(piece)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until all pieces are written. Return whether all pieces are written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes and not self._dropped, timeout_s)

    def _run(self) -> None:
        while True:
            piece = self._next()
            with suppress(OSError):  # the reader has exited or the disk is full, so the error cannot be reported
                self._write(piece)
            with self._changed:
                self._bytes -= len(piece)
                self._changed.notify_all()

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._dropped)
            if not self._waiting:
                self._report_gap()
            return self._waiting.popleft()

    def _report_gap(self) -> None:
        if self._dropped:
            self._append(self._gap(self._dropped))
            self._dropped = 0

    def _append(self, piece: bytes) -> None:
        self._waiting.append(piece)
        self._bytes += len(piece)
        self._changed.notify_all()
