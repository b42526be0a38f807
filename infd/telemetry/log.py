"""What a log line looks like and where it goes.

Rooms use the standard `logging` module under the names `infd.<room>`. A message
is words of ours; whatever a client sent travels in fields (`extra={...}`), where it
cannot forge a line. Prompts are never logged.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from infd.telemetry.journal import JournalHandler, fields_of, goes_to_journal

if TYPE_CHECKING:
    from infd.config import LogConfig

_ACCESS = logging.getLogger("infd.access")


def configure(config: LogConfig, journal_stream: str = "") -> None:
    """Send the process's log to standard error or the journal.

    journal_stream  $JOURNAL_STREAM: names the pipe that systemd put on standard error
    """
    chosen = config.format
    if chosen == "auto":
        chosen = "journal" if goes_to_journal(journal_stream, sys.stderr.fileno()) else "plain"
    handler: logging.Handler
    if chosen == "journal":
        handler = JournalHandler()
    else:
        handler = StandardError()
        handler.setFormatter(Json() if chosen == "json" else Plain())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("infd").setLevel(config.level.upper())
    _ACCESS.setLevel(logging.NOTSET if config.access else logging.CRITICAL)


def access(*, quiet: bool = False, **fields: Any) -> None:
    """Write the line of one answered request. `quiet`: only for those who want to see everything."""
    _ACCESS.log(logging.DEBUG if quiet else logging.INFO, "request", extra=fields)


class StandardError(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at that moment: a progress bar takes its place, so that lines go above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class Plain(logging.Formatter):
    """`time LEVEL logger message key=value ...`; continued lines are indented, so that none can pose as a record."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, record.name, super().format(record).replace("\n", "\n    ")]
        parts.extend(f"{key}={_plain(value)}" for key, value in fields_of(record))
        return " ".join(parts)


class Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in fields_of(record) if key not in line)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text.isascii() and text.isprintable() and text and not set(text) & set(' "='):
        return text
    return ascii(msgspec.json.encode(text).decode())[1:-1]
