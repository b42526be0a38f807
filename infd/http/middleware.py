"""The middlewares around every route. Outermost first:

1. log_access assigns the request id, and writes the access line, whatever the outcome; none for the paths in OPEN
2. answer_errors answers an exception with an error body in the API's format; once a stream has begun, routes/generating
   reports the error instead
3. check refuses, in this order: unknown HTTP versions, and body framing that leaves the start of the next request
   ambiguous; requests without an API key, except for paths in OPEN, compared as the client sent them, and public
   metrics; expectations (the Expect header) other than 100-continue. It answers CORS preflight requests before it asks
   for a key

Every middleware costs each request time, so the checks share one.

`finish_headers` runs last, just before the headers of a response are sent, streamed or not.
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
    shorten,
)
from infd.http import connection, expectations, failure, orca
from infd.http.exchange import Exchange
from infd.http.formats.messages import ANTHROPIC_VERSION, MESSAGES_ERRORS
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.service import ERRORS, EXCHANGE, SERVICE
from infd.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from infd.http.formats.base import Errors
    from infd.http.service import Service

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN: Final = frozenset({"/livez", "/readyz", "/health", "/ping", "/version"})
METRICS: Final = "/metrics"

# A request id from a client is echoed in a header and written to the log, so it must be printable and short.
_CLIENT_ID: Final = re.compile(r"[!-~]{1,128}")
_RETRYABLE: Final = frozenset({Overloaded.status, NotReady.status})
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_MAX_PARAM_CHARACTERS: Final = 128  # characters in the log; `param` may contain a field name that the client chose
_CLIENT_GONE: Final = 499  # nginx's status for a client that disconnects before the response


@web.middleware
async def log_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Assign the request id; write the access line, and count the request.

    Health probes are neither logged nor counted; scrapes are logged at debug level, and not counted.
    """
    client_id = request.headers.get("X-Request-Id", "")
    exchange = request[EXCHANGE] = Exchange(
        client_id=client_id if _CLIENT_ID.fullmatch(client_id) else None,
        errors=_errors(request),
    )
    began = time.monotonic()
    client = connection.of(request)
    client.mark_busy()
    status = _CLIENT_GONE
    try:
        response = await handler(request)
        status = response.status
        if not response.prepared:
            _set_own_headers(response, exchange)
        return response
    except ConnectionError:
        # aiohttp detects the lost connection itself. A raised error would form a reference cycle with aiohttp's task.
        return web.Response(status=status)
    finally:
        client.mark_idle()
        del request[EXCHANGE]  # aiohttp keeps the request object until the next request arrives
        if _raw_path(request) not in OPEN:  # health probes arrive every second
            seconds = time.monotonic() - began
            # In the event loop's next turn, after the response is written.
            asyncio.get_running_loop().call_soon(_report, request, exchange, client.peer, status, seconds)


def _report(request: web.Request, exchange: Exchange, peer: str, status: int, seconds: float) -> None:
    """Write the access line, and count the request. peer: see connection.Connection."""
    scrapes = _raw_path(request) == METRICS
    if log.logs_access(quiet=scrapes):
        log.access(quiet=scrapes, **_access_fields(request, exchange, peer, status, seconds))
    if not scrapes:
        request.app[SERVICE].metrics.answered(_handler(request), _method(request), status, seconds)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an exception with an error body; a lost connection gets no response."""
    exchange, allow = request[EXCHANGE], None
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except web.HTTPMethodNotAllowed as refused:
        allow = refused.headers.get("Allow")
        error: RequestError = MethodNotAllowed(
            f"{shorten(request.method)} is not a method of {shorten(request.path)}, which takes {allow}"
        )
    except web.HTTPNotFound:
        error = UnknownPath(f"there is no {shorten(request.path)} here")
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
async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests that no handler may receive, and answer CORS preflight requests; pass other requests on."""
    service = request.app[SERVICE]
    _check_framing(request)
    if (answer := service.origins.preflight(request)) is not None:
        return answer
    _authorize(request, service)
    expectations.check(request)
    return await handler(request)


def _check_framing(request: web.Request) -> None:
    """Refuse unknown HTTP versions, and transfer codings that infd or HTTP/1.0 does not support (RFC 9112, 6.1)."""
    if request.version not in (HttpVersion10, HttpVersion11):
        raise UnknownVersion
    codings = request.headers.getall("Transfer-Encoding", ())
    if codings and request.version == HttpVersion10:
        raise InvalidHttp("HTTP/1.0 has no Transfer-Encoding: send a Content-Length, or HTTP/1.1")
    if codings and ", ".join(codings).lower() != "chunked":
        raise InvalidHttp("the only transfer coding accepted is chunked")


def _authorize(request: web.Request, service: Service) -> None:
    """Identify the API key. Unknown paths require a key too, so that a client without a key cannot probe for paths."""
    path = _raw_path(request)
    if path not in OPEN and not (path == METRICS and service.config.metrics.public):
        exchange = request[EXCHANGE]
        exchange.key = service.keys.identify(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
        exchange.account = service.accounts.of(exchange.key)


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers that all responses share, and decide whether the connection closes after the response."""
    service = request.app[SERVICE]
    response.headers["Server"] = "infd"  # without a version number; /version reports it
    if (exchange := request.get(EXCHANGE)) is not None:
        _set_own_headers(response, exchange)
    if response.status in _RETRYABLE:
        response.headers.setdefault("Retry-After", "1")
    service.origins.set_headers(request, response)
    if (form := request.headers.get(orca.REQUEST)) is not None:
        orca.set_header(form, service.engine, response)
    # Without a length, HTTP/1.0 marks the end of a body by closing the connection.
    ends_by_close = request.version == HttpVersion10 and response.content_length is None
    if ends_by_close or service.engine.lifecycle.state is State.DRAINING or connection.unread_body_too_large(request):
        response.force_close()
    if not response.keep_alive:
        response.headers["Connection"] = "close"
    connection.set_server_version(request)


def _set_own_headers(response: web.StreamResponse, exchange: Exchange) -> None:
    """Set the headers that depend on the request: its id, and the rest of its key's limits."""
    response.headers["X-Request-Id"] = response.headers[exchange.errors.request_id_header] = exchange.id
    response.headers.update(exchange.errors.rate_headers(exchange.account.standings()))


def _errors(request: web.Request) -> Errors:
    """Return the path's encoder of errors; for other paths Anthropic's if anthropic-version is sent, else OpenAI's."""
    others = MESSAGES_ERRORS if ANTHROPIC_VERSION in request.headers else OPENAI_ERRORS
    return request.app[ERRORS].get(request.path, others)


def _raw_path(request: web.Request) -> str:
    # The path before decoding: percent-encoding or an absolute-form target must not disguise a path as a path in OPEN.
    return request.raw_path.partition("?")[0]


def _handler(request: web.Request) -> str:
    """Return the route's name, a label in metrics. Paths are no labels, because clients can send any number of them."""
    resource = request.match_info.route.resource
    return "none" if resource is None else resource.name or resource.canonical


def _method(request: web.Request) -> str:
    return request.method if request.method in _METHODS else "OTHER"


def _access_fields(
    request: web.Request, exchange: Exchange, peer: str, status: int, seconds: float
) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": exchange.id,
        "client": exchange.client,
        "peer": request.app[SERVICE].proxies.client(peer, request.headers.getall("X-Forwarded-For", ())),
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
