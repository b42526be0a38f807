"""The errors of text-embeddings-inference's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import Internal, NotReady, Overloaded, RateLimited
from infd.http.formats.openai import OpenAIErrors
from infd.http.schema.tei import TeiError

if TYPE_CHECKING:
    from infd.errors import RequestError

_TYPES: Final = {
    Overloaded.status: "Overloaded",
    RateLimited.status: "Overloaded",
    Internal.status: "Backend",
    NotReady.status: "Unhealthy",
}


class TeiErrors(OpenAIErrors):
    """Errors as `{"error", "error_type"}`. The message names the wrong field."""

    def error_body(self, error: RequestError) -> bytes:
        message = str(error)
        if error.param and error.param not in message:
            message = f"{error.param}: {message}"
        return msgspec.json.encode(TeiError(error=message, error_type=_TYPES.get(error.status, "Validation")))


TEI_ERRORS: Final = TeiErrors()
