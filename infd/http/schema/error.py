"""Errors in OpenAI's format."""

from __future__ import annotations

from msgspec import Struct


class ErrorDetail(Struct, kw_only=True):
    """`param` is a dotted path into the request, such as `messages[2].content`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, kw_only=True):
    """The body of an error response, and of the event that ends a failed stream."""

    error: ErrorDetail
