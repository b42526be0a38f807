"""Arguments and items of the feeds `top` and `logs`. As in protocol.py, later versions only add fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from infd.admin.protocol import LoraRow, RequestRow, Status
from infd.telemetry.window import Recent

Level = Literal["debug", "info", "warning", "error"]


class WatchTop(Struct, forbid_unknown_fields=True):
    """Read frames, one JSON object per line.

    interval_s  seconds between frames
    frames      end after this many; null: continue until the subscriber disconnects or the daemon exits
    rows        most requests in a frame, oldest first
    """

    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    frames: Annotated[int, Meta(ge=1)] | None = None
    rows: Annotated[int, Meta(ge=0, le=1024)] = 256


class Process(Struct):
    """The daemon's process: resident memory, open files and their limit, HTTP connections."""

    memory_bytes: int
    files: int
    most_files: int
    connections: int


class Frame(Struct):
    """The daemon at one time.

    seq               number of the frame in this stream, from 1
    time              Unix time
    dropped           frames before this one that were not computed, because the reader had not read the one before
    uptime_s          seconds since the daemon started
    oldest_waiting_s  age of the oldest request of which nothing is computed now; null if no request waits
    rejected          requests refused since the start, by error code
    requests          oldest first, at most `WatchTop.rows` of them; `requests_total` counts all
    """

    seq: int
    time: float
    dropped: int
    uptime_s: float
    status: Status
    recent: Recent
    process: Process
    oldest_waiting_s: float | None
    rejected: dict[str, int]
    loras: list[LoraRow]
    requests: list[RequestRow]
    requests_total: int


class ReadLogs(Struct, forbid_unknown_fields=True):
    """Read the log, one JSON object per line.

    last     records to begin with
    since    begin after the record with this number instead; all records if none has reached it, as after a restart
    level    only records of this level and above, among those that the daemon's log.level admits
    request  only records about the request with this id: its X-Request-Id, or the id of `RequestRow`; empty: all
    follow   continue with new records until the subscriber disconnects or the daemon exits
    """

    last: Annotated[int, Meta(ge=0)] = 100
    since: Annotated[int, Meta(ge=0)] | None = None
    level: Level = "debug"
    request: str = ""
    follow: bool = False


class LogRecord(Struct):
    """A record of the log.

    seq      consecutive number; a daemon's first record is 1. Records that `ReadLogs` leaves out leave gaps
    time     Unix time
    trace    lines of an exception or a stack; mostly empty
    dropped  earlier records that were discarded unread
    """

    seq: int
    time: float
    level: str
    logger: str
    message: str
    fields: dict[str, str | int | float | bool]
    trace: str = ""
    dropped: int = 0
