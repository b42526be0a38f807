"""The errors and the end-of-stream marker of OpenAI's APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.http.formats.base import event
from infd.http.schema.error import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from infd.errors import RequestError

DONE: Final = b"data: [DONE]\n\n"


def detail(error: RequestError) -> ErrorDetail:
    return ErrorDetail(message=str(error), type=error.type, param=error.param, code=error.code)


class OpenAIErrors:
    """Errors as `{"error": {message, type, param, code}}`; other routes use this format by default."""

    request_id_header = "X-Request-Id"

    def error_body(self, error: RequestError) -> bytes:
        return msgspec.json.encode(ErrorBody(error=detail(error)))

    def error_events(self, error: RequestError) -> bytes:
        return event(self.error_body(error)) + DONE


OPENAI_ERRORS: Final = OpenAIErrors()
