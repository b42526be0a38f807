"""One connection: its limits, the response to bytes that are not HTTP, and the closing of the connection.

After its last response the server closes a connection in two steps: it shuts down writing, then for up to LINGER_S
reads and drops up to headers.LINGER_BYTES of further input. Without the second step, input that arrives at the closed
socket would be answered with a TCP reset, which discards a response that the client has not read yet.

A client that closes its sending side between requests, or after a whole request, counts as disconnected. A client that
closes its sending side within a request gets a 400.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from infd.errors import InvalidHttp, InvalidRequest, Overloaded, UnknownVersion
from infd.http import failure, headers, proxies
from infd.http.connections import address_of
from infd.http.sse import HIGH_WATER

if TYPE_CHECKING:
    import asyncio

    from aiohttp.streams import StreamReader
    from aiohttp.web_server import Server

    from infd.config import ServerConfig
    from infd.http.connections import Connections
    from infd.http.proxies import Proxies
    from infd.http.routing import Request
    from infd.telemetry.metrics import Metrics

HEADER_BYTES: Final = 16 * 2**10
HEADERS: Final = 100
# Once more than HIGH_WATER bytes are unsent, the server drops the connection unless at most a quarter of HIGH_WATER
# remains unsent within this time.
STALL_S: Final = 30.0
# Time for which the server reads and drops input, after a response that closes the connection or in a body that no
# handler reads. `headers.LINGER_BYTES` limits the bytes.
LINGER_S: Final = 5.0
# Iterations of the event loop between the headers' deadline and the drop: a delayed event loop then still reads headers
# that arrived in time.
HEADER_GRACE_ITERATIONS: Final = 10

LIMITS: Final[dict[str, Any]] = {
    "lingering_time": LINGER_S,
    "max_line_size": HEADER_BYTES,
    "max_field_size": HEADER_BYTES,
    "max_headers": HEADERS,
    "auto_decompress": False,
    "access_log": None,
}


class Connection(web.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One client's connection."""

    __slots__ = (
        "_answered",
        "_arriving",
        "_connections",
        "_ended",
        "_header_deadline",
        "_header_timeout_s",
        "_linger_bytes",
        "_linger_deadline",
        "_metrics",
        "_proxies",
        "_proxy_header",
        "_refused",
        "_stall_deadline",
        "_stream",
        "address",
        "peer",
    )

    def __init__(
        self,
        server: Server,  # type: ignore[type-arg, unused-ignore]
        connections: Connections,
        config: ServerConfig,
        trusted: Proxies,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=config.idle_timeout_s, **LIMITS)
        self.address = ""
        self.peer = ""  # the client's address, or that of a proxy which names none
        self._connections = connections
        self._proxies = trusted
        self._proxy_header: bytearray | None = bytearray() if config.proxy_protocol else None  # None: read, or absent
        self._metrics = metrics
        self._header_timeout_s = config.header_timeout_s
        self._header_deadline: asyncio.Handle | None = None
        self._stall_deadline: asyncio.TimerHandle | None = None
        self._linger_deadline: asyncio.TimerHandle | None = None
        self._linger_bytes = headers.LINGER_BYTES  # remaining bytes to read and drop
        self._arriving: StreamReader | None = None  # body of the newest request, until complete
        self._answered = False  # whether the newest request was answered before its body was complete
        self._refused = False  # whether further input is dropped instead of parsed
        self._ended = False  # whether the client has closed its sending side
        self._stream: asyncio.Transport | None = None  # None after connection_lost; `transport` may be None earlier

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = self._stream = cast("asyncio.Transport", transport)
        stream.set_write_buffer_limits(high=HIGH_WATER)
        peername = stream.get_extra_info("peername")
        self.peer = peername[0] if isinstance(peername, tuple) else ""
        if self._proxies.trusts(self.peer):
            self.address = ""
        else:
            self.address, self._proxy_header = address_of(peername), None
        super().connection_made(transport)
        if not self._enter(stream):
            return
        self._header_deadline = self._loop.call_later(
            self._header_timeout_s, self._expire_headers, HEADER_GRACE_ITERATIONS
        )

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._paused and isinstance(exc, TimeoutError):
            self._count_slow_reader()  # TCP_USER_TIMEOUT equals STALL_S, and often expires just before the stall timer
        self._connections.leave(self)
        for deadline in (self._header_deadline, self._stall_deadline, self._linger_deadline):
            if deadline is not None:
                deadline.cancel()
        super().connection_lost(exc)
        self._stream = self._arriving = None  # both refer to this connection: ends the reference cycles

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._drop_input(len(data))
            return
        if self._proxy_header is not None:
            data = self._read_proxy_header(data)
            if not data:
                return
        super().data_received(data)
        self._check_messages()

    def _enter(self, stream: asyncio.Transport) -> bool:
        """Count the connection; if it is refused, answer so and return False."""
        try:
            self._connections.enter(self)
        except Overloaded as refusal:
            failure.count(refusal, self._metrics)
            stream.write(failure.raw(refusal))
            self.force_close()
            return False
        return True

    def _read_proxy_header(self, data: bytes) -> bytes:
        """Take the PROXY header from the input, and count the connection for the client that it names.

        Returns the input after the header; empty if the header is incomplete, malformed, or its client is refused.
        """
        assert self._proxy_header is not None
        self._proxy_header += data
        try:
            header = proxies.read(self._proxy_header)
        except InvalidHttp:
            self._metrics.dropped["bad_proxy_header"] += 1
            self.drop()
            return b""
        if header is None:
            return b""
        rest, self._proxy_header = bytes(self._proxy_header[header.length :]), None
        if header.address is not None and self._stream is not None:
            self._connections.leave(self)
            self.peer, self.address = header.address, address_of((header.address, 0))
            if not self._enter(self._stream):
                return b""
        return rest

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the input. Return whether the connection remains open, to refuse an incomplete request."""
        self._ended = True
        if self._linger_deadline is not None:
            return False
        if self._refused or not self._within_a_request():
            return self._refused
        if self._answered and self._arriving is not None and not self._arriving.is_eof():
            return False  # only a body that no handler reads is incomplete
        error = InvalidHttp("the input ended before the request was whole")
        if not self._refuse(error):
            self._messages.append((_ErrInfo(error.status, error, str(error)), EMPTY_PAYLOAD))
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        return True

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        self._answered = request.content is self._arriving
        answer, gone = await super().finish_response(request, resp, start_time)
        del cast("Request", request).exchange  # aiohttp keeps the request until the next one arrives
        if request.content.is_eof() and not request.content.at_eof():
            request.content.read_nowait()  # aiohttp would keep an unread body until the next request
        self._check_messages()  # input after a declined upgrade is parsed only now
        if not gone and not answer.keep_alive:
            self._linger()
        return answer, gone

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_deadline = self._loop.call_later(STALL_S, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_deadline is not None:
            self._stall_deadline.cancel()

    def mark_busy(self) -> None:
        """Record that a request's headers, or its body, have arrived: the client waits for the server."""
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
        self._connections.mark_busy(self)

    def mark_idle(self) -> None:
        """Record that the server waits for the client to send a body or the next request."""
        self._connections.mark_idle(self)

    def drop(self) -> None:
        """Abort the connection; unsent bytes are discarded."""
        if self._stream is not None:
            self._stream.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that the parser refused before any route was chosen, and close the connection."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has disconnected: no response, no log record
        if status != InvalidRequest.status or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        refusal = exc if isinstance(exc, InvalidHttp) else _parser_error(message or "")
        failure.count(refusal, self._metrics)
        return failure.response(refusal)

    def _within_a_request(self) -> bool:
        """Return whether the parser lacks part of a request's headers or body. This call makes the parser unusable."""
        assert self._parser is not None
        try:
            return self._parser.feed_eof() is not None
        except HttpProcessingError:
            return True

    def _check_messages(self) -> None:
        """Record the body of the newest request, or the parser's error."""
        if not self._messages:
            return
        newest, body = self._messages[-1]
        if isinstance(newest, _ErrInfo):
            self._refuse(InvalidHttp("the body is not valid HTTP/1.1"))
        else:
            self._arriving, self._answered = None if body.is_eof() else body, False

    def _refuse(self, error: InvalidHttp) -> bool:
        """Parse no more requests. Return whether a body was still arriving; if so, the body's reader raises `error`."""
        self._refused = True
        body, self._arriving = self._arriving, None
        if body is None or body.is_eof():
            return False
        body.set_exception(error)
        return True

    def _linger(self) -> None:
        """Shut down writing; drop input until the client closes its side, or LINGER_S or LINGER_BYTES are used up."""
        stream = self._stream
        if stream is None or stream.is_closing():
            return
        self._refused = self._force_close = True  # aiohttp then ends its task without closing the transport
        self.mark_busy()
        self.mark_idle()
        if self._ended or self._linger_bytes < 0:
            stream.close()
            return
        if stream.can_write_eof():  # TLS has no half-closed connection
            stream.write_eof()
        self._resume_transport_reading()
        self._linger_deadline = self._loop.call_later(LINGER_S, stream.close)

    def _drop_input(self, size: int) -> None:
        self._linger_bytes -= size
        if self._linger_bytes >= 0 or self._stream is None:
            return
        if self._linger_deadline is not None:
            self._stream.close()
        else:
            self._stream.pause_reading()  # until the error response is sent

    def _expire_headers(self, iterations: int) -> None:
        """Drop the connection unless a request begins within `iterations` more iterations of the event loop."""
        if iterations:
            self._header_deadline = self._loop.call_soon(self._expire_headers, iterations - 1)
        else:
            self._metrics.dropped["slow_headers"] += 1
            self.drop()

    def _stalled(self) -> None:
        self._count_slow_reader()
        self.drop()

    def _count_slow_reader(self) -> None:
        self._metrics.dropped["slow_reader"] += 1
        request = cast("Request | None", self._current_request)
        if request is not None and request.exchange.ticket is not None:
            request.exchange.ticket.departure = "slow_reader"


def _parser_error(message: str) -> InvalidHttp | UnknownVersion:
    """Return the error for a message of aiohttp's parser."""
    if "Invalid HTTP version" in message or "Pause on PRI" in message:
        return UnknownVersion()
    return InvalidHttp("the request is not valid HTTP/1.1")


def of(request: web.BaseRequest) -> Connection:
    """Return the connection of a request."""
    return cast("Connection", request.protocol)
