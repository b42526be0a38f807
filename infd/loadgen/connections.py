"""HTTP/1.1 connections for the measured requests, kept from one request to the next.

A server's times contain what the client takes to write a request and to read the answer: beside a busy server aiohttp's
client takes 0.6 ms, these connections a small part of that. All other requests are aiohttp's.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

_END: Final = b"\r\n"
_CONTINUES: Final = range(100, 200)  # statuses of heads that precede the answer's


class Malformed(ConnectionError):
    """The bytes that arrived are no HTTP/1.1."""


class NotConnected(Exception):
    """There is no connection to the server. reason: the error of TLS or of the system."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Connections:
    """Connections to servers, at most one request on each at a time.

    timeout_s  for which a request may take
    """

    def __init__(self, timeout_s: float | None, tls: ssl.SSLContext | None = None) -> None:
        """Begin without connections. tls: context of TLS; None: asyncio's."""
        self.timeout_s = timeout_s
        self._tls = tls
        self._idle: dict[str, list[_Connection]] = {}  # by scheme and authority

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a request; return the answer once its head has arrived. Raises NotConnected, OSError.

        The caller calls `Answer.close`.
        """
        address = urlsplit(url)
        authority = address.netloc.rpartition("@")[2]
        target = (address.path or "/") + (f"?{address.query}" if address.query else "")
        fields = {"Host": authority, **headers, "Content-Length": str(len(body))}
        if address.username is not None:
            credentials = f"{unquote(address.username)}:{unquote(address.password or '')}"
            fields.setdefault("Authorization", f"Basic {base64.b64encode(credentials.encode()).decode()}")
        head = "".join(
            [f"POST {target} HTTP/1.1\r\n", *(f"{name}: {each}\r\n" for name, each in fields.items()), "\r\n"]
        )

        idle = self._idle.setdefault(f"{address.scheme}://{authority}", [])
        connection = None
        while idle and connection is None:
            connection = idle.pop()
            connection = None if connection.ended else connection
        if connection is None:
            encrypted = address.scheme == "https"
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection,
                    address.hostname or "",
                    address.port or (443 if encrypted else 80),
                    ssl=(self._tls or True) if encrypted else None,
                )
            except OSError as error:  # those of TLS too
                raise NotConnected(error) from None
        try:
            return await connection.ask(head.encode() + body, idle)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the connections that serve no request."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


class Answer:
    """An answer whose head has arrived."""

    def __init__(self, connection: _Connection, idle: list[_Connection], head: bytes) -> None:
        """idle: receives the connection again. Raises Malformed."""
        first, *lines = head.split(_END)
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip().lower()
        try:
            self.status = int(first[9:12])
            self._chunked = fields.get(b"transfer-encoding") == b"chunked"
            length = fields.get(b"content-length")
            self._rest = None if length is None or self._chunked else int(length)
        except ValueError:
            raise Malformed(repr(head[:100])) from None
        self._reusable = first.startswith(b"HTTP/1.1") and fields.get(b"connection") != b"close"
        self._whole = False
        self._connection = connection
        self._idle = idle

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises OSError if the connection ends before the body."""
        connection = self._connection
        if self._chunked:
            while size := await self._chunk():
                while size:
                    piece = await connection.take(size)
                    size -= len(piece)
                    yield piece
                await connection.line()
            while await connection.line():
                pass  # fields behind the body
        elif self._rest is None:  # the body ends with the connection
            self._reusable = False
            while piece := await connection.rest():
                yield piece
        else:
            while self._rest:
                piece = await connection.take(self._rest)
                self._rest -= len(piece)
                yield piece
        self._whole = True

    async def read(self) -> bytes:
        """Return the whole body. Raises OSError if the connection ends before."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Keep the connection for another request if the body was read; otherwise close it."""
        if self._whole and self._reusable:
            self._idle.append(self._connection)
        else:
            self._connection.close()

    async def _chunk(self) -> int:
        """Return the size of the next chunk; 0 behind the last."""
        line = await self._connection.line()
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError:
            raise Malformed(repr(line[:100])) from None


class _Connection(asyncio.Protocol):
    """One connection, and the bytes that have arrived and are not read.

    ended  whether no more bytes will arrive
    """

    def __init__(self) -> None:
        self.ended = False
        self._error: Exception | None = None
        self._arrived = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self._error = True, exc
        self._wake()

    async def ask(self, request: bytes, idle: list[_Connection]) -> Answer:
        """Send a request; return its answer. idle: receives the connection again."""
        assert self._transport is not None
        self._transport.write(request)
        while True:
            answer = Answer(self, idle, await self._until(b"\r\n\r\n"))
            if answer.status not in _CONTINUES:
                return answer

    async def take(self, most: int) -> bytes:
        """Return the next bytes, at least one."""
        while not self._arrived:
            await self._more()
        return self._cut(most)

    async def rest(self) -> bytes:
        """Return the next bytes; none once the connection has ended."""
        while not (self._arrived or self.ended):
            await self._more()
        return self._cut(len(self._arrived))

    async def line(self) -> bytes:
        return await self._until(_END)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _until(self, end: bytes) -> bytes:
        """Return the bytes up to `end`, and drop `end`."""
        while (at := self._arrived.find(end)) < 0:
            await self._more()
        found = self._cut(at)
        del self._arrived[: len(end)]
        return found

    async def _more(self) -> None:
        """Return once more bytes have arrived. Raises OSError if none will."""
        if self.ended:
            raise self._error or ConnectionResetError("the server closed the connection")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _cut(self, most: int) -> bytes:
        found = bytes(self._arrived[:most])
        del self._arrived[:most]
        return found

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
