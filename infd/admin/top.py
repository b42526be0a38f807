"""The frames of the feed `top`. Between two frames the daemon does nothing for a subscriber."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from contextlib import suppress
from itertools import count, islice
from typing import TYPE_CHECKING, Final

import msgspec

from infd.admin.items import Frame, Process
from infd.admin.protocol import LoraRow, RequestRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from infd.admin.items import WatchTop
    from infd.admin.protocol import Status
    from infd.engine.engine import Engine

MOST_LORAS: Final = 64  # adapters in a frame, those in use first


async def frames(
    engine: Engine, status: Callable[[], Status], closing: asyncio.Event, args: WatchTop
) -> AsyncGenerator[Frame, None]:
    """Yield a frame at once and then each interval, until `closing` is set.

    The next frame is computed once the previous is written. Intervals that passed before that are counted as dropped.
    """
    loop = asyncio.get_running_loop()
    began, seq = loop.time(), 0
    for _ in islice(count(), args.frames):
        due = max(seq, int((loop.time() - began) / args.interval_s))  # number of intervals before the next frame
        with suppress(TimeoutError):
            async with asyncio.timeout_at(began + due * args.interval_s):
                await closing.wait()
        if closing.is_set():
            return
        frame = compose(engine, status(), args.rows)
        frame.seq, frame.dropped, seq = due + 1, due - seq, due + 1
        yield frame


def compose(engine: Engine, status: Status, rows: int) -> Frame:
    """Return a frame of the present, with at most `rows` requests."""
    loras = sorted(engine.adapters.rows(), key=lambda row: -row.requests)[:MOST_LORAS]
    return Frame(
        seq=1,
        time=time.time(),
        dropped=0,
        uptime_s=engine.window.age_s,
        status=status,
        recent=engine.window.recent(),
        process=_process(engine.metrics.connections),
        oldest_waiting_s=engine.oldest_waiting_s(),
        rejected=dict(engine.metrics.rejected),
        loras=msgspec.convert(loras, list[LoraRow], from_attributes=True),
        requests=msgspec.convert(engine.requests(rows), list[RequestRow], from_attributes=True),
        requests_total=len(engine.admission),
    )


def _process(connections: int) -> Process:
    with open("/proc/self/statm", "rb") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    # Linux 6.2 and later give the number as the size; listing thousands of files would hold up the loop.
    files = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    return Process(resident, files, resource.getrlimit(resource.RLIMIT_NOFILE)[0], connections)
