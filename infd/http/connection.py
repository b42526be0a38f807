"""The limits of one connection, and what a client hears whose bytes are not HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from infd.errors import InvalidRequest, Overloaded
from infd.http import failure
from infd.http.connections import address_of
from infd.http.sse import HIGH_WATER

if TYPE_CHECKING:
    import asyncio

    from aiohttp.web_server import Server

    from infd.config import ServerConfig
    from infd.http.connections import Connections
    from infd.telemetry.metrics import Metrics

HEADER_BYTES: Final = 16 * 2**10
HEADERS: Final = 100
# A reader that does not take HIGH_WATER bytes in this time has stopped reading.
STALL_S: Final = 30.0
# Of the loop, in which a request that has arrived is read and begun: whoever seems late may have waited for us.
TURNS: Final = 10

LIMITS: Final[dict[str, Any]] = {
    "lingering_time": 5.0,
    "max_line_size": HEADER_BYTES,
    "max_field_size": HEADER_BYTES,
    "max_headers": HEADERS,
    "auto_decompress": False,
    "access_log": None,
}


class Connection(web.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One client's connection."""

    __slots__ = (
        "_connections",
        "_header_deadline",
        "_header_timeout_s",
        "_metrics",
        "_stall_deadline",
        "_stream",
        "address",
    )

    def __init__(
        self,
        server: Server,  # type: ignore[type-arg, unused-ignore]
        connections: Connections,
        config: ServerConfig,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=config.idle_timeout_s, **LIMITS)
        self.address = ""
        self._connections = connections
        self._metrics = metrics
        self._header_timeout_s = config.header_timeout_s
        self._header_deadline: asyncio.Handle | None = None
        self._stall_deadline: asyncio.TimerHandle | None = None
        self._stream: asyncio.Transport | None = None  # also while it closes, when `transport` is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = self._stream = cast("asyncio.Transport", transport)
        stream.set_write_buffer_limits(high=HIGH_WATER)
        self.address = address_of(stream.get_extra_info("peername"))
        super().connection_made(transport)
        try:
            self._connections.enter(self)
        except Overloaded as refusal:
            failure.count(refusal, self._metrics)
            stream.write(failure.raw(refusal))
            self.force_close()
            return
        self._header_deadline = self._loop.call_later(self._header_timeout_s, self._headers_are_late, TURNS)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.leave(self)
        for deadline in (self._header_deadline, self._stall_deadline):
            if deadline is not None:
                deadline.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_deadline = self._loop.call_later(STALL_S, self._too_late, "slow_reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_deadline is not None:
            self._stall_deadline.cancel()

    def busy(self) -> None:
        """Work for this client begins: its request, or the body of it, has arrived."""
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None
        self._connections.busy(self)

    def silent(self) -> None:
        """Its client keeps us waiting: for a body, or for the next request."""
        self._connections.silent(self)

    def drop(self) -> None:
        """Close now, without a word, whatever is still to be sent."""
        if self._stream is not None:
            self._stream.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never reached a route: the parser refused it. It closes the connection."""
        if isinstance(exc, ConnectionError):
            raise exc  # nobody is left to answer, and there is nothing to log
        if status != InvalidRequest.status or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        response = failure.response(InvalidRequest("the request is not valid HTTP/1.1", code="invalid_http"))
        response.headers["Server"] = "infd"
        response.force_close()
        return response

    def _headers_are_late(self, turns: int) -> None:
        """Close, after so many turns of the loop, unless the request has begun by then."""
        if turns:
            self._header_deadline = self._loop.call_soon(self._headers_are_late, turns - 1)
        else:
            self._too_late("slow_headers")

    def _too_late(self, reason: str) -> None:
        self._metrics.dropped[reason] += 1
        self.drop()


def of(request: web.BaseRequest) -> Connection:
    """Return the connection on which a request came."""
    return cast("Connection", request.protocol)
