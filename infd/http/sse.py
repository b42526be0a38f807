"""How events reach a reader.

Headers wait for the first event, so that an error before it keeps its real
status; a reader that hears nothing for a while, in the queue or before the door
of an engine at rest, gets its headers, later a comment. A reader that lags is
waited for: what is buffered for it stays within HIGH_WATER and one slice on our
side of the kernel. One that stops reading is dropped by its connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiohttp import web

from infd.http.pieces import joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from infd.http.pieces import Pieces

HIGH_WATER: Final = 32 * 2**10  # bytes that may wait in a transport before its writer does
BEAT_S: Final = 5.0
BEATS_TO_HEADERS: Final = 2
BEATS_TO_PING: Final = 3

PING: Final = b": ping\n\n"


class Streams:
    """All open event streams, so that one timer keeps them all alive."""

    def __init__(self) -> None:
        self._open: set[EventStream] = set()

    def __iter__(self) -> Iterator[EventStream]:
        return iter(tuple(self._open))

    def open(self, request: web.Request) -> EventStream:
        stream = EventStream(request, self._open)
        self._open.add(stream)
        return stream

    async def beat(self) -> None:
        """Count one beat for every stream; those quiet for too long are written to."""
        for stream in self:
            # Its own handler meets the same lost connection, and ends the work.
            with suppress(ConnectionError):
                await stream.beat()

    async def keep_alive(self) -> None:
        """Beat for ever."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.beat()


class EventStream:
    """One response made of events. Use as a context manager: leaving it forgets the stream."""

    def __init__(self, request: web.Request, registry: set[EventStream]) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # else nginx gathers tokens into pages
            }
        )
        self.begun = False
        self._request = request
        self._registry = registry
        self._beginning = asyncio.Lock()  # handler and timer may both want to begin
        self._quiet_beats = 0
        self._lagging = False
        self._transport: asyncio.Transport | None = None
        self._direct: asyncio.Transport | None = None  # once headers and a first chunk have left, and chunks may follow

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._registry.discard(self)

    @property
    def buffered_bytes(self) -> int:
        """What waits on our side of the kernel."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def writable(self) -> bool:
        """Whether `write` may be called: the response has begun, and its reader has taken all that was written."""
        transport = self._direct
        return transport is not None and not (transport.get_write_buffer_size() or transport.is_closing())

    def write(self, events: bytes) -> None:
        """Write whole events while the response is `writable`: what response.write comes to, without its four calls."""
        assert self._direct is not None
        self._quiet_beats = 0
        self._direct.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def send(self, events: bytes) -> None:
        """Write whole events. Waits for a reader that lags; raises ConnectionError when it is gone."""
        self._quiet_beats = 0
        transport = self._transport or await self._begin()
        if len(events) > HIGH_WATER or transport.get_write_buffer_size():
            await self._send_slowly((events,))
        elif self.writable:
            self.write(events)
        else:
            await self.response.write(events)  # with the headers, the first time: they wait for it
            if self.response.headers.get("Transfer-Encoding") == "chunked":
                self._direct = transport

    async def send_pieces(self, events: Pieces) -> None:
        """Write whole events that are too large to be joined; nothing comes between their pieces."""
        self._quiet_beats = 0
        if self._transport is None:
            await self._begin()
        await self._send_slowly(joined(events, HIGH_WATER))

    async def close(self) -> None:
        """End the response properly."""
        self._registry.discard(self)
        await self.response.write_eof()

    async def beat(self) -> None:
        """Say something if nothing was said for long: first the headers, then comments."""
        self._quiet_beats += 1
        if self._quiet_beats < (BEATS_TO_PING if self.begun else BEATS_TO_HEADERS):
            return
        # One who lags hears from us as it is, must not hold up the others' pings, and may be in the middle of an event.
        if not self._lagging and not self.buffered_bytes:
            await self.send(PING)

    async def _begin(self) -> asyncio.Transport:
        async with self._beginning:
            transport = self._request.transport
            if transport is None:
                raise ConnectionResetError("the client has gone")
            if not self.begun:
                await self.response.prepare(self._request)
                self.begun = True
                self._transport = transport
            return transport

    async def _send_slowly(self, pieces: Iterable[bytes]) -> None:
        self._lagging = True
        try:
            for piece in pieces:
                for start in range(0, len(piece), HIGH_WATER):
                    await self._request.writer.drain()
                    await self.response.write(piece[start : start + HIGH_WATER])
        finally:
            self._lagging = False
