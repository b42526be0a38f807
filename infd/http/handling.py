"""What is done around every route:

1. assign the request id, and write the access line, whatever the outcome; none for the paths in OPEN
2. answer an error with an error body in the API's format; once a stream has begun, routes/generating reports the error
   instead
3. refuse, in this order: unknown HTTP versions, and body framing that leaves the start of the next request ambiguous;
   requests without an API key, except for paths in OPEN, compared as the client sent them, and public metrics;
   expectations (the Expect header) other than 100-continue. CORS preflight requests are answered before a key is asked
   for

`headers.py` sets the headers of all responses just before they are sent, streamed or not.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from infd.errors import InvalidHttp, UnknownVersion
from infd.http import connection, expectations, failure
from infd.http.formats.messages import ANTHROPIC_VERSION, MESSAGES_ERRORS
from infd.http.formats.openai import OPENAI_ERRORS
from infd.telemetry import log

if TYPE_CHECKING:
    from infd.http.exchange import Exchange
    from infd.http.formats.base import Errors
    from infd.http.routing import Request

OPEN: Final = frozenset({"/livez", "/readyz", "/health", "/ping", "/version"})
METRICS: Final = "/metrics"

# A request id from a client is echoed in a header and written to the log, so it must be printable and short.
_CLIENT_ID: Final = re.compile(r"[!-~]{1,128}")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_MAX_PARAM_CHARACTERS: Final = 128  # characters in the log; `param` may contain a field name that the client chose
_CLIENT_GONE: Final = 499  # nginx's status for a client that disconnects before the response


async def handle(request: Request) -> web.StreamResponse:
    """Answer a request; write the access line, and count the request.

    Health probes are neither logged nor counted; scrapes are logged at debug level, and not counted.
    """
    exchange = request.exchange
    client_id = request.headers.get("X-Request-Id", "")
    exchange.client_id = client_id if _CLIENT_ID.fullmatch(client_id) else None
    exchange.errors = _errors(request)
    began = time.monotonic()
    client = connection.of(request)
    client.mark_busy()
    status = _CLIENT_GONE
    try:
        response = await _answer(request, exchange)
        status = response.status
        return response
    except ConnectionError:
        # aiohttp detects the lost connection itself. A raised error would form a reference cycle with aiohttp's task.
        return web.Response(status=status)
    finally:
        client.mark_idle()
        if _raw_path(request) not in OPEN:  # health probes arrive every second
            seconds = time.monotonic() - began
            # In the event loop's next turn, after the response is written.
            asyncio.get_running_loop().call_soon(_report, request, exchange, client.peer, status, seconds)


def _report(request: Request, exchange: Exchange, peer: str, status: int, seconds: float) -> None:
    """Write the access line, and count the request. peer: see connection.Connection."""
    scrapes = _raw_path(request) == METRICS
    if log.logs_access(quiet=scrapes):
        log.access(quiet=scrapes, **_access_fields(request, exchange, peer, status, seconds))
    if not scrapes:
        request.service.metrics.answered(request.route.path, _method(request), status, seconds)


async def _answer(request: Request, exchange: Exchange) -> web.StreamResponse:
    """Answer a request by its route, and an exception with an error body; a lost connection gets no response."""
    try:
        return _checked(request, exchange) or await request.route.handler(request)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as unexpected:
        exchange.error = failure.translate(unexpected, exchange)
    failure.count(exchange.error, request.service.metrics)
    return failure.response(exchange.error, exchange.errors)


def _checked(request: Request, exchange: Exchange) -> web.StreamResponse | None:
    """Refuse requests that no handler may receive. Return the answer to a CORS preflight request, None for others."""
    _check_framing(request)
    if (answer := request.service.origins.preflight(request)) is not None:
        return answer
    _authorize(request, exchange)
    expectations.check(request)
    return None


def _check_framing(request: Request) -> None:
    """Refuse unknown HTTP versions, and transfer codings that infd or HTTP/1.0 does not support (RFC 9112, 6.1)."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise UnknownVersion
    codings = request.headers.getall("Transfer-Encoding", ())
    if codings and request.version == HttpVersion10:
        raise InvalidHttp("HTTP/1.0 has no Transfer-Encoding: send a Content-Length, or HTTP/1.1")
    if codings and ", ".join(codings).lower() != "chunked":
        raise InvalidHttp("the only transfer coding accepted is chunked")


def _authorize(request: Request, exchange: Exchange) -> None:
    """Identify the API key. Unknown paths require a key too, so that a client without a key cannot probe for paths."""
    service, path = request.service, _raw_path(request)
    if path not in OPEN and not (path == METRICS and service.config.metrics.public):
        exchange.key = service.keys.identify(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
        exchange.account = service.accounts.of(exchange.key)


def _errors(request: Request) -> Errors:
    """Return the route's encoder of errors; if it has none, Anthropic's if anthropic-version is sent, else OpenAI's."""
    if (errors := request.route.errors) is not None:
        return errors
    return MESSAGES_ERRORS if ANTHROPIC_VERSION in request.headers else OPENAI_ERRORS


def _raw_path(request: Request) -> str:
    # The path before decoding: percent-encoding or an absolute-form target must not disguise a path as a path in OPEN.
    return request.raw_path.partition("?")[0]


def _method(request: Request) -> str:
    return request.method if request.method in _METHODS else "OTHER"


def _access_fields(request: Request, exchange: Exchange, peer: str, status: int, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": exchange.id,
        "client": exchange.client,
        "peer": request.service.proxies.client(peer, request.headers.getall("X-Forwarded-For", ())),
        "method": request.method,
        "path": request.path,
        "status": status,
        "total_ms": round(seconds * 1e3, 1),
    }
    if (error := exchange.error) is not None:
        fields |= {"error": failure.reason(error), "param": error.param and error.param[:_MAX_PARAM_CHARACTERS]}
    if exchange.ticket is not None:
        fields |= exchange.ticket.summary()
        if exchange.client_id is not None:
            fields["ticket"] = exchange.ticket.id
    if error is not None:
        fields |= error.facts
    return fields
