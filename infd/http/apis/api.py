"""The interfaces of APIs: of those that generate text, and of those that reduce prompts to numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from infd.http.schema.sampling import GenerationFields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import msgspec

    from infd.config import Config
    from infd.http.formats.base import Accepted, Errors, Format
    from infd.http.generation import Generation
    from infd.http.pooling.pooling import Pooling, Reduced
    from infd.http.served_model import ServedModel

Request = TypeVar("Request", bound=GenerationFields)
Body = TypeVar("Body", bound=Struct)


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


class PoolingApi(Struct, Generic[Body], frozen=True):
    """An API that reduces prompts to numbers.

    decoder  decodes the body of a request
    pooling  converts a request, given its body's size in bytes, the model and the settings; raises RequestError
    body     returns the body of the answer, piece by piece
    errors   encodes errors that precede the decoded body
    form     returns the encoder of later errors, given the decoded body; None: `errors`
    """

    decoder: msgspec.json.Decoder[Body]
    pooling: Callable[[Body, int, ServedModel, Config], Pooling]
    body: Callable[[Body, Reduced], Iterable[bytes]]
    errors: Errors
    form: Callable[[Body], Errors] | None = None
