"""The errors and the end-of-stream marker of OpenAI's APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.http.formats.base import event
from infd.http.schema.error import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.errors import RequestError
    from infd.http.rates import Standing

DONE: Final = b"data: [DONE]\n\n"


def detail(error: RequestError) -> ErrorDetail:
    return ErrorDetail(message=str(error), type=error.type, param=error.param, code=error.code)


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it, in Go's notation: 20ms, 1.5s, 6m0s, 1h0m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest / 1000:g}s"


class OpenAIErrors:
    """Errors as `{"error": {message, type, param, code}}`; other routes use this format by default."""

    request_id_header = "X-Request-Id"

    def error_body(self, error: RequestError) -> bytes:
        return msgspec.json.encode(ErrorBody(error=detail(error)))

    def rate_headers(self, standings: Sequence[Standing]) -> dict[str, str]:
        headers: dict[str, str] = {}
        for standing in standings:
            headers[f"x-ratelimit-limit-{standing.unit}"] = str(standing.limit)
            headers[f"x-ratelimit-remaining-{standing.unit}"] = str(standing.remaining)
            headers[f"x-ratelimit-reset-{standing.unit}"] = duration(standing.reset_s)
        return headers

    def error_events(self, error: RequestError) -> bytes:
        return event(self.error_body(error)) + DONE


OPENAI_ERRORS: Final = OpenAIErrors()
