"""How long an operator's connection may say nothing, how many there may be, and what one hears that speaks no HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from infd.admin.answers import problem

if TYPE_CHECKING:
    import asyncio

    from aiohttp.web_server import Server

IDLE_S: Final = 15.0
MOST: Final = 64
_HTTP: Final[dict[str, Any]] = {"access_log": None, "auto_decompress": False}


class Connection(web.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One operator's connection.

    among  all that are open, the oldest first
    busy   a request of its is being answered
    """

    __slots__ = ("_among", "_ends", "_first_request_due", "_stream", "busy")

    def __init__(
        self,
        server: Server,  # type: ignore[type-arg, unused-ignore]
        among: dict[Connection, None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, **_HTTP)
        self.busy = False
        self._among = among
        self._ends: asyncio.Task[Any] | None = None
        self._first_request_due: asyncio.TimerHandle | None = None
        self._stream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        # What aiohttp calls keep-alive starts after the first answer.
        self._first_request_due = self._loop.call_later(IDLE_S, self.drop)
        self._among[self] = None
        if len(self._among) > MOST:  # the oldest that is idle makes room; where none is, the newcomer itself
            next(connection for connection in self._among if not connection.busy).drop()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget()
        if self._ends is not None:
            self._ends.cancel()
        super().connection_lost(exc)

    def asked(self) -> None:
        """Its first request, or the next one, has arrived."""
        self.busy = True
        if self._first_request_due is not None:
            self._first_request_due.cancel()
            self._first_request_due = None

    def ends(self, task: asyncio.Task[Any] | None) -> None:
        """Have a task, which is at work on its answer, end with the connection. None: no longer."""
        self._ends = task

    def drop(self) -> None:
        """Close now, without a word."""
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
        """Answer what the parser refused. It closes the connection."""
        if status != web.HTTPBadRequest.status_code or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        answer = problem(status, "invalid_http", "the request is not valid HTTP/1.1; use infdctl or curl")
        answer.force_close()
        return answer

    def _forget(self) -> None:
        self._among.pop(self, None)
        if self._first_request_due is not None:
            self._first_request_due.cancel()
            self._first_request_due = None


def of(request: web.BaseRequest) -> Connection:
    """Return the connection on which a request came."""
    return cast("Connection", request.protocol)
