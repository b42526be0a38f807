"""The formats and destinations of the log.

Each package logs through the standard `logging` module as `infd.<package>`. A
message is fixed text; clients' data is logged in fields (`extra={...}`), which
are escaped, so that no client forges a line. Prompts are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from infd.telemetry.backlog import FLUSH_S, Backlog, gap_record
from infd.telemetry.journal import JournalHandler, fields_of, goes_to_journal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.config import LogConfig

_ACCESS = logging.getLogger("infd.access")
_SLOW = logging.getLogger("infd.slow")


def configure(config: LogConfig, journal_stream: str = "") -> None:
    """Send the process's log to standard error or the journal.

    journal_stream  $JOURNAL_STREAM, which identifies the stream that systemd has connected to the journal
    """
    chosen = config.format
    if chosen == "auto":
        chosen = "journal" if goes_to_journal(journal_stream, sys.stderr.fileno()) else "plain"
    handler = JournalHandler() if chosen == "journal" else StandardError(Json() if chosen == "json" else Plain())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    set_levels(config)


def set_levels(config: LogConfig) -> None:
    """Set the lowest level logged, and whether requests are."""
    logging.getLogger("infd").setLevel(config.level.upper())
    _ACCESS.setLevel(logging.NOTSET if config.access else logging.CRITICAL)


def adopt(library: str) -> None:
    """Send the records of an imported library to this process's log instead of the library's own handlers."""
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True


def logs_access(*, quiet: bool = False) -> bool:
    """Return whether `access` would log."""
    return _ACCESS.isEnabledFor(logging.DEBUG if quiet else logging.INFO)


def access(*, quiet: bool = False, **fields: Any) -> None:
    """Log one answered request; `quiet`: at debug level instead of info."""
    _ACCESS.log(logging.DEBUG if quiet else logging.INFO, "request", extra=fields)


def slow(**fields: Any) -> None:
    """Log a request that took longer than `log.slow_s`."""
    _SLOW.warning("slow request", extra=fields)


class StandardError(logging.Handler):
    """A handler that writes to the current sys.stderr. A progress bar replaces sys.stderr, to keep lines above the bar.

    If standard error is a regular file, the caller writes the line. The reader of any other file may stall, so a thread
    writes the lines.
    """

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream = sys.stderr
        regular = stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode)
        self._backlog = None if regular else Backlog(self._write, lambda lines: self._line(gap_record(lines)))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
            if self._backlog is not None:
                self._backlog.put(line)
            else:
                with suppress(OSError):  # the disk is full
                    self._write(line)
        except Exception:  # as in logging's own handlers: a lost record must not end the daemon
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, for at most FLUSH_S."""
        if self._backlog is not None:
            self._backlog.wait(FLUSH_S)

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(errors="backslashreplace")

    def _write(self, line: bytes) -> None:
        if sys.stderr is not self._stream:
            sys.stderr.write(line.decode())
            return
        # Bypasses Python's buffer. If that cannot be flushed at exit, the interpreter exits with status 120, or hangs.
        descriptor, rest = self._stream.fileno(), memoryview(line)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # another process that shares the file may have set O_NONBLOCK
                writable = select.poll()
                writable.register(descriptor, select.POLLOUT)
                writable.poll()


class Plain(logging.Formatter):
    """The format `time LEVEL logger message key=value ...`.

    Continuation lines are indented, so that text with line breaks cannot forge a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        return plain_line(record.created, record.levelname, record.name, super().format(record), fields_of(record))


class Json(logging.Formatter):
    """The format of one JSON object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in fields_of(record) if key not in line)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def plain_line(created: float, level: str, logger: str, text: str, fields: Iterable[tuple[str, Any]]) -> str:
    """Return a record in the format of Plain. `text`: message and traceback; `created`: Unix time."""
    words = [_time(created), level, logger, text.replace("\n", "\n    ")]
    words.extend(f"{key}={plain(value)}" for key, value in fields)
    return " ".join(words)


def _time(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def plain(value: object) -> str:
    """Return a value as one word of a line, quoted and escaped if necessary."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text.isascii() and text.isprintable() and text and not set(text) & set(' "='):
        return text
    return json.dumps(text).replace("\x7f", "\\u007f")
