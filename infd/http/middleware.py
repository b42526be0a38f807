"""The middlewares around every route. Outermost first:

1. record     gives the request its id, and writes its access line when it is over, however it ended
2. explain    turns what was raised into an error body in the API's words, unless a stream has begun (routes/generating)
3. frame      refuses versions and framing of HTTP that leave open where the next request begins
4. preflight  answers browsers that ask whether a page may send a request
5. authorize  lets nothing through without a key but the paths named in OPEN, compared as the client sent them
6. understand refuses expectations (the Expect header) other than 100-continue

`finish_headers` runs last, when a response is about to leave, streamed or not.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11

from infd.engine.lifecycle.state import State
from infd.errors import (
    InvalidHttp,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    RequestError,
    UnknownPath,
    UnknownVersion,
    brief,
)
from infd.http import connection, expectations, failure
from infd.http.exchange import Exchange
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.service import ERRORS, EXCHANGE, SERVICE
from infd.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN: Final = frozenset({"/livez", "/readyz", "/health", "/ping", "/version"})
METRICS: Final = "/metrics"

# A client's own id is echoed in a header and written to the log: printable and short.
_CLIENT_ID: Final = re.compile(r"[!-~]{1,128}")
_COME_BACK: Final = frozenset({Overloaded.status, NotReady.status})
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_LONGEST_PARAM: Final = 128  # characters in the log; some name a field that only the client knows
_CLIENT_GONE: Final = 499  # proxies log this for a client that left before the answer


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id; write its access line."""
    given = request.headers.get("X-Request-Id", "")
    exchange = request[EXCHANGE] = Exchange(
        client_id=given if _CLIENT_ID.fullmatch(given) else None,
        errors=request.app[ERRORS].get(request.path, OPENAI_ERRORS),
    )
    began = time.monotonic()
    client = connection.of(request)
    client.busy()
    status = _CLIENT_GONE
    try:
        response = await handler(request)
        status = response.status
        if not response.prepared:
            response.headers["X-Request-Id"] = exchange.id
        return response
    except ConnectionError:
        # aiohttp notices by itself that the client has gone. Raising the error would tie it into a cycle with its task.
        return web.Response(status=status)
    finally:
        client.silent()
        del request[EXCHANGE]  # aiohttp keeps the request until the next one comes
        path = _raw_path(request)
        if path not in OPEN:  # probes come every second
            seconds = time.monotonic() - began
            log.access(quiet=path == METRICS, **_access_fields(request, exchange, status, seconds))
            if path != METRICS:
                request.app[SERVICE].metrics.answered(_handler(request), _method(request), status, seconds)


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflight requests of browsers; others pass."""
    return request.app[SERVICE].origins.preflight(request) or await handler(request)


@web.middleware
async def explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors with their body; a client that has gone gets none."""
    exchange, allow = request[EXCHANGE], None
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except web.HTTPMethodNotAllowed as refused:
        allow = refused.headers.get("Allow")
        error: RequestError = MethodNotAllowed(
            f"{brief(request.method)} is not a method of {brief(request.path)}; it knows {allow}"
        )
    except web.HTTPNotFound:
        error = UnknownPath(f"there is no {brief(request.path)} here")
    except web.HTTPException as refused:
        error = InvalidRequest(refused.reason)
    except Exception as unexpected:
        error = failure.translate(unexpected, exchange)
    exchange.error = error
    failure.count(error, request.app[SERVICE].metrics)
    response = failure.response(error, exchange.errors)
    if allow is not None:
        response.headers["Allow"] = allow
    return response


@web.middleware
async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what is not HTTP/1.1 or 1.0, and a body framed as its version does not know (RFC 9112, 6.1)."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise UnknownVersion
    codings = request.headers.getall("Transfer-Encoding", ())
    if codings and request.version == HttpVersion10:
        raise InvalidHttp("HTTP/1.0 knows no Transfer-Encoding: send a Content-Length, or HTTP/1.1")
    if codings and ", ".join(codings).lower() != "chunked":
        raise InvalidHttp("a body comes as it is or chunked, in no other transfer coding")
    return await handler(request)


@web.middleware
async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Identify the key. Unknown paths need one too, so that a client without a key cannot learn which paths exist."""
    service = request.app[SERVICE]
    path = _raw_path(request)
    if path not in OPEN and not (path == METRICS and service.config.metrics.public):
        request[EXCHANGE].key = service.keys.identify(request.headers.get("Authorization"))
    return await handler(request)


@web.middleware
async def understand(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse other expectations."""
    expectations.check(request)
    return await handler(request)


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set X-Request-Id, Retry-After and CORS headers; while draining, close the connection after the answer."""
    service = request.app[SERVICE]
    response.headers["Server"] = "infd"  # no versions: what runs here is in /version
    if (exchange := request.get(EXCHANGE)) is not None:
        response.headers["X-Request-Id"] = exchange.id
    if response.status in _COME_BACK:
        response.headers.setdefault("Retry-After", "1")
    service.origins.mark(request, response)
    endless = request.version == HttpVersion10 and response.content_length is None  # but for the connection's end
    if endless or service.engine.lifecycle.state is State.DRAINING or connection.leaves_too_much_unread(request):
        response.force_close()
    if not response.keep_alive:
        response.headers["Connection"] = "close"
    connection.speak_our_version(request)


def _raw_path(request: web.Request) -> str:
    # The path as sent, so that decoding or an absolute-form target cannot disguise another path as an open one.
    return request.raw_path.partition("?")[0]


def _handler(request: web.Request) -> str:
    """Name the route, not the path: metrics may have only so many labels, and clients choose paths."""
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.name or resource.canonical


def _method(request: web.Request) -> str:
    return request.method if request.method in _METHODS else "OTHER"


def _access_fields(request: web.Request, exchange: Exchange, status: int, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": exchange.id,
        "client": exchange.client,
        "peer": request.remote,
        "method": request.method,
        "path": request.path,
        "status": status,
        "total_ms": round(seconds * 1e3, 1),
    }
    if (error := exchange.error) is not None:
        fields |= {"error": failure.reason(error), "param": error.param and error.param[:_LONGEST_PARAM]}
    if exchange.ticket is not None:
        fields |= exchange.ticket.summary()
        if exchange.client_id is not None:
            fields["ticket"] = exchange.ticket.id
    return fields
