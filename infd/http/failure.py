"""Errors as clients read them: `{"error": {message, type, param, code}}`, the same bytes wherever they are sent."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from infd.errors import Internal, NotReady, RequestError, Unauthorized, UnknownVersion, without_frames
from infd.http.schema.error import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from infd.http.service import Exchange
    from infd.telemetry.metrics import Metrics

_LOG = logging.getLogger("infd.http")


def translate(error: Exception, exchange: Exchange) -> RequestError:
    """Return what to tell the client. What is not the client's to fix is logged here, once.

    Neither error keeps the frames of its handler.
    """
    if isinstance(error, RequestError):
        return without_frames(error)
    _LOG.error("a request failed", exc_info=error, extra={"request_id": exchange.id})
    without_frames(error)
    return Internal(exchange.id)


def count(error: RequestError, metrics: Metrics) -> None:
    """Count a refusal by its reason. A fault of ours is none: it ends as an error."""
    if error.status < Internal.status or error.status in (NotReady.status, UnknownVersion.status):
        metrics.rejected[reason(error)] = metrics.rejected.get(reason(error), 0) + 1


def reason(error: RequestError) -> str:
    """Return the word for it in metrics and in the log."""
    return error.code or "invalid_request"


def body(error: RequestError) -> bytes:
    """Return the JSON of an error."""
    detail = ErrorDetail(message=str(error), type=error.type, param=error.param, code=error.code)
    return msgspec.json.encode(ErrorBody(error=detail))


def response(error: RequestError) -> web.Response:
    """Return the response that an error becomes while no part of another one has been sent."""
    answer = web.Response(body=body(error), status=error.status, content_type="application/json")
    if error.retry_after_s is not None:
        answer.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == Unauthorized.status:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if error.closes:
        answer.force_close()
    return answer


def raw(error: RequestError) -> bytes:
    """Return the same as bytes, for a client that has not asked anything yet and shall not."""
    content = body(error)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Server: infd",
        "Connection: close",
        f"Retry-After: {error.retry_after_s}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join((*head, "", "")).encode() + content
