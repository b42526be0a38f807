"""The limits of one connection, and what a client hears whose bytes are not HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from infd.errors import InvalidRequest
from infd.http import failure
from infd.http.sse import HIGH_WATER

if TYPE_CHECKING:
    import asyncio

# Counted from connect as well, so it bounds how slowly headers may arrive.
IDLE_S: Final = 15
HEADER_BYTES: Final = 16 * 2**10
HEADERS: Final = 100

LIMITS: Final[dict[str, Any]] = {
    "keepalive_timeout": IDLE_S,
    "lingering_time": 5.0,
    "max_line_size": HEADER_BYTES,
    "max_field_size": HEADER_BYTES,
    "max_headers": HEADERS,
    "auto_decompress": False,
    "access_log": None,
}


class Connection(web.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One client's connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=HIGH_WATER)
        super().connection_made(transport)

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
        response.force_close()
        return response
