"""Send server-sent events.

The first event is sent together with the headers, so that an error before the first event has its own HTTP status.
If no event is sent for some seconds, for example while a request is queued, the server sends the headers, and later
pings, which are comments. The server waits for slow readers, so that for each stream this process buffers at most
HIGH_WATER bytes and one slice. `connection.py` drops a client that stops reading.
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

HIGH_WATER: Final = 32 * 2**10  # bytes buffered in a transport before writers must wait
BEAT_S: Final = 5.0
BEATS_TO_HEADERS: Final = 2
BEATS_TO_PING: Final = 3

PING: Final = b": ping\n\n"


class Streams:
    """All open event streams; one timer sends the pings of all streams."""

    def __init__(self) -> None:
        self._open: set[EventStream] = set()

    def __iter__(self) -> Iterator[EventStream]:
        return iter(tuple(self._open))

    def open(self, request: web.BaseRequest) -> EventStream:
        stream = EventStream(request, self._open)
        self._open.add(stream)
        return stream

    async def beat(self) -> None:
        """Call `beat` of every stream."""
        for stream in self:
            # A lost connection also raises ConnectionError in the stream's handler, which ends the request.
            with suppress(ConnectionError):
                await stream.beat()

    async def keep_alive(self) -> None:
        """Call `beat` every BEAT_S."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.beat()


class EventStream:
    """A response of server-sent events. Leaving the stream's context removes the stream from `Streams`."""

    def __init__(self, request: web.BaseRequest, registry: set[EventStream]) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # prevents nginx from buffering events
            }
        )
        self.begun = False
        self._request = request
        self._registry = registry
        self._beginning = asyncio.Lock()  # only one of handler and timer may begin the response
        self._idle_beats = 0
        self._lagging = False
        self._transport: asyncio.Transport | None = None
        self._direct: asyncio.Transport | None = None  # set after the first chunk of a chunked response

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._registry.discard(self)

    @property
    def buffered_bytes(self) -> int:
        """Bytes buffered in this process."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def writable(self) -> bool:
        """Whether `write` may be called: the response has begun, and this process buffers none of its bytes."""
        transport = self._direct
        return transport is not None and not (transport.get_write_buffer_size() or transport.is_closing())

    def write(self, events: bytes) -> None:
        """Write whole events to the transport as one chunk, faster than response.write. Call only while `writable`."""
        assert self._direct is not None
        self._idle_beats = 0
        self._direct.write(b"%x\r\n%b\r\n" % (len(events), events))

    async def send(self, events: bytes) -> None:
        """Write whole events; wait for a slow reader. Raises ConnectionError if the client has disconnected."""
        self._idle_beats = 0
        transport = self._transport or await self._begin()
        if len(events) > HIGH_WATER or transport.get_write_buffer_size():
            await self._send_slowly((events,))
        elif self.writable:
            self.write(events)
        else:
            await self.response.write(events)  # the first call sends the headers too
            if self.response.headers.get("Transfer-Encoding") == "chunked":
                self._direct = transport

    async def send_pieces(self, events: Pieces) -> None:
        """Write whole events too large to be joined. No other bytes are sent between the pieces."""
        self._idle_beats = 0
        if self._transport is None:
            await self._begin()
        await self._send_slowly(joined(events, HIGH_WATER))

    async def close(self) -> None:
        """Send the end of the response."""
        self._registry.discard(self)
        await self.response.write_eof()

    async def beat(self) -> None:
        """Send a ping after BEATS_TO_HEADERS calls without an event; once the response has begun, after BEATS_TO_PING.

        The first ping begins the response with its headers.
        """
        self._idle_beats += 1
        if self._idle_beats < (BEATS_TO_PING if self.begun else BEATS_TO_HEADERS):
            return
        # No ping for a slow reader: part of an event may be unsent, and waiting would delay the pings of other streams.
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
