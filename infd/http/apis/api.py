"""An API that generates text: what a route, a batch or a caller in process needs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from infd.http.schema.sampling import GenerationFields

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from infd.config import Config
    from infd.http.formats.base import Accepted, Errors, Format
    from infd.http.generation import Generation

Request = TypeVar("Request", bound=GenerationFields)


class Api(Struct, Generic[Request], frozen=True):
    """An API that generates text.

    generation  given a request, the bytes of its body and the settings: what it asks for; raises RequestError
    format      the words of its answer
    errors      the words of errors before there is an answer
    """

    decoder: msgspec.json.Decoder[Request]
    generation: Callable[[Request, int, Config], Generation]
    format: Callable[[Request, Accepted], Format]
    errors: Errors
