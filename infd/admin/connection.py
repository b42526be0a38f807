"""Limit the number and the idle time of admin connections, and answer bytes that are not HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from infd.admin.answers import problem

if TYPE_CHECKING:
    import asyncio

    from aiohttp.web_server import Server

IDLE_S: Final = 15.0
MAX_CONNECTIONS: Final = 64
_HTTP: Final[dict[str, Any]] = {"access_log": None, "auto_decompress": False}


class Connection(web.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One admin connection.

    open_connections  all open connections, oldest first, including this connection
    busy              whether a request on this connection is being answered
    """

    __slots__ = ("_cancelled_on_close", "_first_request_due", "_open_connections", "_stream", "busy")

    def __init__(
        self,
        server: Server,  # type: ignore[type-arg, unused-ignore]
        open_connections: dict[Connection, None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, **_HTTP)
        self.busy = False
        self._open_connections = open_connections
        self._cancelled_on_close: asyncio.Task[Any] | None = None
        self._first_request_due: asyncio.TimerHandle | None = None
        self._stream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        # aiohttp's keep-alive timeout starts only after the first answer.
        self._first_request_due = self._loop.call_later(IDLE_S, self.drop)
        self._open_connections[self] = None
        if len(self._open_connections) > MAX_CONNECTIONS:  # drop the oldest idle connection, at worst this one
            next(connection for connection in self._open_connections if not connection.busy).drop()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget()
        if self._cancelled_on_close is not None:
            self._cancelled_on_close.cancel()
        super().connection_lost(exc)

    def request_begun(self) -> None:
        """Mark the connection busy, and cancel the timeout for its first request."""
        self.busy = True
        if self._first_request_due is not None:
            self._first_request_due.cancel()
            self._first_request_due = None

    def cancel_on_close(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task`, which writes an answer, when the connection closes. None: cancel no task."""
        self._cancelled_on_close = task

    def drop(self) -> None:
        """Close the connection at once, without an answer."""
        self._forget()
        if self._stream is not None:
            self._stream.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Send a problem document in answer to bytes that the HTTP parser refused, and close the connection."""
        if status != web.HTTPBadRequest.status_code or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        answer = problem(status, "invalid_http", "the request is not valid HTTP/1.1; use infdctl or curl")
        answer.force_close()
        return answer

    def _forget(self) -> None:
        self._open_connections.pop(self, None)
        if self._first_request_due is not None:
            self._first_request_due.cancel()
            self._first_request_due = None


def of(request: web.BaseRequest) -> Connection:
    """Return the request's connection."""
    return cast("Connection", request.protocol)
