"""The latest log records, for operators who read or follow the log over the admin socket.

A ring buffer stores the records. A follower is a position in the ring: a slow
follower misses the records that the ring has dropped, and receives their number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.telemetry.journal import fields_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    Field = str | int | float | bool

MAX_RECORDS: Final = 2048
MAX_CHARACTERS: Final = 2**20  # of all records' messages, traces and fields
LONGEST: Final = 2**14  # characters of a message, trace or field; the log itself has all


class Record(Struct, frozen=True):
    """One log record.

    seq      number of the record since the daemon started, from 1
    created  Unix time in seconds
    trace    exception and stack, on lines of their own; mostly empty
    size     characters of message, trace and those fields that are text
    """

    seq: int
    created: float
    level: str
    number: int
    logger: str
    message: str
    trace: str
    fields: dict[str, Field]
    size: int

    def fits(self, level: int, request: str) -> bool:
        """Return whether the record is of `level` or above and, unless `request` is empty, about that request."""
        fields = self.fields
        return self.number >= level and (not request or request in (fields.get("request_id"), fields.get("ticket")))


class RecentLogs(logging.Handler):
    """A handler that keeps the latest records in memory. Any thread logs; the event loop's thread reads."""

    def __init__(self, most: int = MAX_RECORDS, most_characters: int = MAX_CHARACTERS) -> None:
        super().__init__()
        self._most = most
        self._most_characters = most_characters
        self._ring: deque[Record] = deque()
        self._characters = 0
        self._formatter = logging.Formatter()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.last = 0  # seq of the latest record
        self.ended = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._append(self._read(record))
        except Exception:  # as in logging's own handlers: a lost record must not end the daemon
            self.handleError(record)

    def _read(self, record: logging.LogRecord) -> Record:
        traces = []
        if record.exc_info:
            traces.append(self._formatter.formatException(record.exc_info))
        if record.stack_info:
            traces.append(self._formatter.formatStack(record.stack_info))
        message, trace = _cut(record.getMessage()), _cut("\n".join(traces))
        fields = {name: _plain(value) for name, value in fields_of(record)}
        size = len(message) + len(trace) + sum(len(text) for text in fields.values() if isinstance(text, str))
        level, number = record.levelname, record.levelno
        return Record(self.last + 1, record.created, level, number, record.name, message, trace, fields, size)

    def _append(self, record: Record) -> None:
        self.last = record.seq
        self._ring.append(record)
        self._characters += record.size
        while len(self._ring) > self._most or self._characters > self._most_characters:
            self._characters -= self._ring.popleft().size
        self._wake()

    def end(self) -> None:
        """End every follower once it has received the remaining records."""
        with self._locked():
            self.ended = True
            self._wake()

    async def read(
        self, last: int, *, since: int | None = None, level: int = 0, request: str = "", follow: bool = False
    ) -> AsyncGenerator[tuple[Record, int], None]:
        """Yield records that fit `level` and `request`, each with the number of records dropped before it.

        last    number of records to begin with, if `since` is None
        since   begin after the record with this number; a number above the latest is from an earlier process, so all
                records are yielded
        follow  continue with new records until `end`
        """
        news = asyncio.Event()
        records, seq = self._begin(last, since, level, request)
        dropped = 0
        try:
            while True:
                for record in records:
                    dropped += record.seq - seq - 1
                    seq = record.seq
                    if record.fits(level, request):
                        yield record, dropped
                        dropped = 0
                if self.last == seq:
                    if not follow or self.ended:
                        return
                    await self._changed(news, seq)
                records = self._after(seq)
        finally:
            with self._locked():
                self._waiting.pop(news, None)

    def _begin(self, last: int, since: int | None, level: int, request: str) -> tuple[list[Record], int]:
        """Return the records with which a reader begins, and the number of the record before them."""
        if since is not None:
            seq = since if since <= self.last else 0
            return self._after(seq), seq
        with self._locked():
            if not last:
                return [], self.last
            chosen = [record for record in self._ring if record.fits(level, request)][-last:]
            seq = chosen[0].seq - 1 if chosen else self.last  # older records were not asked for, so none is missing
            return self._after(seq), seq

    def _after(self, seq: int) -> list[Record]:
        with self._locked():
            unread = min(len(self._ring), self.last - seq)
            return list(islice(self._ring, len(self._ring) - unread, None))

    async def _changed(self, news: asyncio.Event, seq: int) -> None:
        with self._locked():
            if self.last != seq or self.ended:
                return
            news.clear()
            self._waiting[news] = asyncio.get_running_loop()
        await news.wait()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for news, loop in waiting.items():
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.set)

    def _locked(self) -> Any:
        """The lock that `logging` holds while it calls `emit`."""
        assert self.lock is not None
        return self.lock


def _plain(value: object) -> Field:
    return value if isinstance(value, int | float) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
