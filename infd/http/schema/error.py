"""Errors in OpenAI's format."""

from __future__ import annotations

from msgspec import Struct


class ErrorDetail(Struct, kw_only=True):
    """One error. `param` is the dotted path of the wrong field, for example `messages[2].content`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, kw_only=True):
    """The body of an error response, and the data of a failed stream's error event."""

    error: ErrorDetail
