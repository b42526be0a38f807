"""The interface of an API that generates text."""

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

    decoder     decodes the body of a request
    generation  converts a request, given its body's size in bytes and the settings; raises RequestError
    format      returns the encoder of a request's answer
    errors      encodes errors that precede the answer
    """

    decoder: msgspec.json.Decoder[Request]
    generation: Callable[[Request, int, Config], Generation]
    format: Callable[[Request, Accepted], Format]
    errors: Errors
