"""One operation of the HTTP API: request body, answers and errors of a route."""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import Struct

from infd.errors import (
    Aborted,
    AdapterUnavailable,
    BodyTooLarge,
    CannotServe,
    ConversationNotFound,
    GrammarFailed,
    GrammarInterrupted,
    Internal,
    InvalidRequest,
    ModelNotFound,
    NothingAllowed,
    NotReady,
    NotStored,
    Overloaded,
    PromptTooLong,
    QueueTimeout,
    RequestError,
    RequestTimeout,
    ResponseNotFound,
    Unauthorized,
    UnknownExpectation,
    UnknownVersion,
    Unsupported,
)
from infd.http.schema.error import ErrorBody

Errors = tuple[type[RequestError], ...]

ANY: Final[Errors] = (InvalidRequest, UnknownExpectation, Internal, UnknownVersion)
KEYED: Final[Errors] = (*ANY, Unauthorized, Overloaded)
MODEL: Final[Errors] = (*KEYED, NotReady)
BODY: Final[Errors] = (*MODEL, BodyTooLarge, Unsupported)
PROMPT: Final[Errors] = (*BODY, ModelNotFound, PromptTooLong)
POOLED: Final[Errors] = (*PROMPT, QueueTimeout, RequestTimeout, Aborted, AdapterUnavailable, CannotServe)
GENERATED: Final[Errors] = (*POOLED, GrammarFailed, GrammarInterrupted, NothingAllowed)
RESPONSE: Final[Errors] = (*KEYED, ResponseNotFound, NotStored)
CONVERSATION: Final[Errors] = (*KEYED, ConversationNotFound, NotStored)


class Parameter(Struct, frozen=True, kw_only=True):
    """A parameter of a query, or of the path if the path contains its name."""

    name: str
    type: Any
    text: str


class Link(Struct, frozen=True, kw_only=True):
    """A later operation on the object that this operation creates.

    operation   its `Operation.name`
    parameters  parameter -> a runtime expression of OpenAPI for its value
    """

    operation: str
    parameters: dict[str, str]


class Operation(Struct, frozen=True, kw_only=True):
    """One operation.

    name     a unique id
    request  Struct of the request's body; None: no body
    answers  types of the answer's body
    streams  whether the request may ask for server-sent events
    errors   errors that the operation may answer; `failures` are the types of their bodies
    failing  status of a failed probe, whose body has the type of 200's; None: no probe
    """

    method: Literal["get", "post", "delete"]
    path: str
    name: str
    text: str
    tag: str
    request: type[Struct] | None = None
    answers: tuple[Any, ...] = (dict[str, Any],)
    media_type: str = "application/json"
    streams: bool = False
    errors: Errors = KEYED
    failures: tuple[type[Struct], ...] = (ErrorBody,)
    failing: int | None = None
    parameters: tuple[Parameter, ...] = ()
    links: tuple[Link, ...] = ()
