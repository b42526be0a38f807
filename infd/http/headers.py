"""Set the headers that all responses share, just before a response is sent, streamed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp.http import HttpVersion10, HttpVersion11

from infd.engine.lifecycle.state import State
from infd.errors import NotReady, Overloaded
from infd.http import orca

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.exchange import Exchange
    from infd.http.service import Service

# Most bytes of input that the server reads and drops after a response that closes the connection, and of a body that no
# handler has read and that does not close the connection.
LINGER_BYTES: Final = 8 * 2**20
_RETRYABLE: Final = frozenset({Overloaded.status, NotReady.status})


def finish(request: web.BaseRequest, response: web.StreamResponse, service: Service, exchange: Exchange) -> None:
    """Set the headers, and decide whether the connection closes after the response."""
    headers = response.headers
    headers["Server"] = "infd"  # without a version number; /version reports it
    headers["X-Request-Id"] = headers[exchange.errors.request_id_header] = exchange.id
    headers.update(exchange.errors.rate_headers(exchange.account.standings()))
    if response.status in _RETRYABLE:
        headers.setdefault("Retry-After", "1")
    service.origins.set_headers(request, response)
    if (form := request.headers.get(orca.REQUEST)) is not None:
        orca.set_header(form, service.engine, response)
    # Without a length, HTTP/1.0 marks the end of a body by closing the connection.
    ends_by_close = request.version == HttpVersion10 and response.content_length is None
    if ends_by_close or service.engine.lifecycle.state is State.DRAINING or _unread_body_too_large(request):
        response.force_close()
    if not response.keep_alive:
        headers["Connection"] = "close"
    # The status line names the server's version of HTTP, not the client's (RFC 9110, 6.2).
    request._cache["version"] = request._version = HttpVersion11


def _unread_body_too_large(request: web.BaseRequest) -> bool:
    """Return whether the connection cannot be reused: the body's unread rest failed, or may be too large to drop."""
    body, size = request.content, request.content_length
    return not body.is_eof() and (size is None or size > LINGER_BYTES or body.exception() is not None)
