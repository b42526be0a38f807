"""Report errors as responses, in metrics and in logs. Formats encode the bodies (formats/)."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from infd.errors import (
    Internal,
    MethodNotAllowed,
    NotReady,
    Overloaded,
    RequestError,
    Unauthorized,
    UnknownVersion,
    without_frames,
)
from infd.http.formats.openai import OPENAI_ERRORS

if TYPE_CHECKING:
    from infd.http.exchange import Exchange
    from infd.http.formats.base import Errors
    from infd.telemetry.metrics import Metrics

_LOG = logging.getLogger("infd.http")


def translate(error: Exception, exchange: Exchange) -> RequestError:
    """Return a RequestError unchanged; log any other error, and return Internal in its place.

    Clears the traceback of `error`, because a traceback keeps the handler's frames alive.
    """
    if isinstance(error, RequestError):
        return without_frames(error)
    _LOG.error("a request failed", exc_info=error, extra={"request_id": exchange.id})
    without_frames(error)
    return Internal(exchange.id)


def count(error: RequestError, metrics: Metrics) -> None:
    """Count a refused request by its reason; a refusal because of load or state also in `turned_away`.

    Internal errors (500), expired requests (504) and errors of the store (507) are not refusals.
    """
    if error.status < Internal.status or error.status in (NotReady.status, UnknownVersion.status):
        metrics.rejected[reason(error)] = metrics.rejected.get(reason(error), 0) + 1
    if error.status in (Overloaded.status, NotReady.status):
        metrics.turned_away[reason(error)] = metrics.turned_away.get(reason(error), 0) + 1


def reason(error: RequestError) -> str:
    """Return the error's label in metrics and in the log."""
    return error.code or "invalid_request"


def response(error: RequestError, errors: Errors = OPENAI_ERRORS) -> web.Response:
    """Return the response that reports an error, for a request whose response has not begun."""
    answer = web.Response(body=errors.error_body(error), status=error.status, content_type="application/json")
    if error.retry_after_s is not None:
        answer.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == Unauthorized.status:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        answer.headers["Allow"] = error.allowed
    if error.closes:
        answer.force_close()
    return answer


def raw(error: RequestError) -> bytes:
    """Return an error response as bytes, for a connection that is closed before its first request."""
    content = OPENAI_ERRORS.error_body(error)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Server: infd",
        "Connection: close",
        f"Retry-After: {error.retry_after_s}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join((*head, "", "")).encode() + content
