"""Every error that infd raises deliberately, with its HTTP status or exit code.

InfdError
├── RequestError           the client can change the request or retry; carries an HTTP status
│   ├── InvalidRequest     400
│   │   ├── InvalidHttp    400 invalid_http; the connection is closed
│   │   └── TooCostly      400, chat template or tokenizer exceeded a limit on this request
│   ├── PromptTooLong      400 context_length_exceeded
│   ├── NothingAllowed     400, raised while generating
│   ├── GrammarFailed      400, a constraint is malformed, unsupported, too large, or failed while generating
│   │   └── TooSlow        400, a limit of time was exceeded
│   ├── GrammarInterrupted 503, with Retry-After
│   ├── Unsupported        400, names the feature
│   ├── CannotServe        400, the route is not for the loaded model
│   ├── Unauthorized       401
│   ├── ModelNotFound      404
│   ├── ResponseNotFound   404
│   ├── ConversationNotFound  404
│   ├── ItemNotFound       404
│   ├── OriginNotAllowed   403, a browser's preflight request
│   ├── UnknownPath        404
│   ├── MethodNotAllowed   405
│   ├── BodyTooLarge       413
│   ├── UnknownExpectation 417
│   ├── ToolServerFailed   424, an MCP server does not answer as the protocol says
│   ├── Overloaded         429, with Retry-After; a limit of load is reached
│   ├── RateLimited        429, with Retry-After; a key or tenant has used up its rate
│   ├── NotReady           503, with Retry-After
│   ├── AdapterUnavailable 503, the adapter's files are missing, changed, or now too large
│   ├── QueueTimeout       503, with Retry-After
│   ├── RequestTimeout     504
│   ├── Aborted            503, aborted by an operator
│   ├── ServerStopped      503, with Retry-After
│   ├── NotStored          507, a response or conversation cannot be stored or read
│   ├── TooManyEvents      507, the events of responses in the background exceed the store's bound
│   ├── UnknownVersion     505, an unknown HTTP version; the connection is closed
│   └── Internal           500, a bug of infd; the message contains the request id
├── AdapterExists          the name belongs to another adapter, or to the model
├── AdapterTooLarge        the adapter exceeds the free memory for adapters
├── TextFailed             chat template, tokenizer or constraint failed unexpectedly, or ended the worker process
├── RequestFailed          infd could not finish an accepted request; sent as the last event of its stream
├── WrongState             an admin verb that the current state does not permit
├── Busy                   weights cannot be loaded, because a load of weights is running
├── CannotSleep            the device cannot release memory
├── WeightsInvalid         a load of weights failed midway; no step may run
├── Overtaken              a transition superseded by a later verb or by shutdown
├── StepTooLarge           a step did not fit in the device's memory; a smaller step may fit
├── DeviceLost             the device is unusable; the daemon exits 70
├── NotAnswered            `infd chat` got no answer from the server; exit code 69
│   ├── RequestRefused     the server answered 400, e.g. to a schema; exit code 65
│   └── KeyRefused         the server answered 401 or 403; exit code 77
└── StartError             the daemon cannot start; carries a sysexits code
    ├── UsageError         64
    ├── InputMalformed     65, a file named on the command line
    ├── DeviceMissing      69
    ├── OutOfMemory        71
    ├── AddressUnavailable 71
    ├── SocketTaken        71, another daemon serves this socket
    ├── FetchFailed        74, the hub did not deliver the model; a retry may succeed
    ├── CheckpointError    78, a checkpoint or an adapter cannot be used
    └── ConfigError        78

A Fault is an error as plain values, for step results and for messages between processes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Collection

Error = TypeVar("Error", bound=BaseException)


def shorten(text: str) -> str:
    """Return a client's text for an error message: if longer than 100 characters, the first 100 and `...`."""
    return text if len(text) <= 100 else text[:100] + "..."


def without_frames(error: Error) -> Error:
    """Drop an error's traceback, cause and context; return the error.

    Otherwise a stored error keeps its traceback's frames alive, and with them a request's body and tokens.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class InfdError(Exception):
    """Base of all errors that infd raises deliberately."""


class RequestError(InfdError):
    """An error that the client receives as `{"error": {message, type, param, code}}`; other requests are unaffected.

    closes  whether the server closes the connection, because it cannot find where the next request starts
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    closes: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param if param is not None else type(self).param
        self.code = code if code is not None else type(self).code

    @property
    def facts(self) -> dict[str, int]:
        """Fields of the request's access line, besides those that every error has."""
        return {}


class InvalidRequest(RequestError):
    """A field is malformed, of the wrong type, out of range, or contradicts another field."""


class InvalidHttp(InvalidRequest):
    """The bytes are not an HTTP request, or the request's length is ambiguous."""

    code, closes = "invalid_http", True


class TooCostly(InvalidRequest):
    """The checkpoint's chat template or tokenizer exceeded a limit of time or memory on this request."""


class PromptTooLong(RequestError):
    code, param = "context_length_exceeded", "messages"

    def __init__(
        self, tokens: int, limit: int, *, at_least: bool = False, answered: bool = True, param: str | None = None
    ) -> None:
        """Clients search the message for OpenAI's words.

        limit     most tokens of a prompt
        answered  whether tokens follow the prompt, so that the context is one token longer
        """
        size = f"at least {tokens}" if at_least else tokens
        context = f"this model's maximum context length is {limit + answered} tokens"
        answer = ", one of them for the answer" if answered else ""
        super().__init__(f"the prompt is {size} tokens; {context}{answer}", param=param)
        self.tokens, self.limit = tokens, limit

    @property
    def facts(self) -> dict[str, int]:
        return {"prompt": self.tokens, "limit": self.limit}


class NothingAllowed(RequestError):
    """The request's constraints together exclude every token."""

    code = "nothing_allowed"

    def __init__(self) -> None:
        super().__init__(
            "logit_bias, min_tokens, bad_words, allowed_token_ids and the grammar leave no token to choose"
        )


class GrammarFailed(RequestError):
    """A constraint cannot be enforced. Codes:

    invalid_grammar      the constraint is malformed
    unsupported_grammar  part of the constraint, such as a keyword of a schema, cannot be enforced exactly; the message
                         states the path of that part
    grammar_too_large    compilation exceeded a limit, or would exceed it
    grammar_failed       a choice's matcher failed while generating; only that choice ends
    """

    code = "grammar_failed"


class TooSlow(GrammarFailed):
    """A constraint was not compiled within the time limit, or the location of its fault was not found in time."""


class GrammarInterrupted(RequestError):
    """The worker process that read the constraint ended, for a reason other than the constraint. Another one starts."""

    status, type, code, retry_after_s = 503, "service_unavailable_error", "grammar_interrupted", 1

    def __init__(self) -> None:
        super().__init__("the process that compiled this request's constraint ended: send the request again")


class Unsupported(RequestError):
    """A known field requests a feature that this server or model does not have."""

    code = "unsupported"

    def __init__(self, feature: str, *, param: str | None = None) -> None:
        super().__init__(f"{feature} is not supported", param=param)


class CannotServe(RequestError):
    """The route needs a model of another kind: one that generates, or one that embeds, classifies or scores."""

    code, param = "unsupported_by_model", "model"


class Unauthorized(RequestError):
    status, code = 401, "invalid_api_key"


class ModelNotFound(RequestError):
    status, code, param = 404, "model_not_found", "model"

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"model {shorten(name)!r} is not served here; served: {', '.join(known)}")


class ResponseNotFound(RequestError):
    """No response with this id is stored for the key's tenant."""

    status, code, param = 404, "response_not_found", "response_id"

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no stored response {shorten(id)!r}; responses are kept for a limited time")


class ConversationNotFound(RequestError):
    """No conversation with this id is stored for the key's tenant."""

    status, code, param = 404, "conversation_not_found", "conversation_id"

    def __init__(self, id: str) -> None:
        super().__init__(f"there is no conversation {shorten(id)!r}; conversations are kept for a limited time")


class ItemNotFound(RequestError):
    status, code, param = 404, "item_not_found", "item_id"

    def __init__(self, id: str) -> None:
        super().__init__(f"the conversation has no item {shorten(id)!r}")


class UnknownPath(RequestError):
    status, code = 404, "unknown_path"


class OriginNotAllowed(RequestError):
    """A preflight request of a web page that the settings do not allow."""

    status, code = 403, "origin_not_allowed"

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"pages of {shorten(origin)} may not send requests here; the operator allows them in server.cors_origins"
        )


class MethodNotAllowed(RequestError):
    """The path is served with other methods: `allowed`, separated by commas."""

    status, code = 405, "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Collection[str]) -> None:
        self.allowed = ",".join(sorted(allowed))
        super().__init__(f"{shorten(method)} is not a method of {shorten(path)}, which takes {self.allowed}")


class BodyTooLarge(RequestError):
    status, code = 413, "body_too_large"


class UnknownExpectation(RequestError):
    status, code = 417, "unknown_expectation"


class ToolServerFailed(RequestError):
    """An MCP server cannot be reached, answers too late, reports an error, or violates the protocol.

    kind    kind of the error in an `mcp_call` item
    number  HTTP status, or JSON-RPC error code
    """

    status, type, code, param = 424, "external_connector_error", "tool_server_failed", "tools"

    def __init__(self, message: str, *, kind: Literal["http_error", "mcp_protocol_error"], number: int) -> None:
        super().__init__(message if len(message) <= 500 else message[:500] + "...")
        self.kind = kind
        self.number = number


class Overloaded(RequestError):
    """A limit of load is reached, such as the length of the queue. Raised before the request is queued."""

    status, type, code, retry_after_s = 429, "overloaded_error", "queue_full", 1

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RateLimited(RequestError):
    """The key or its tenant has used up a rate: OpenAI's type names the unit, `requests` or `tokens`."""

    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, *, unit: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.type = unit  # type: ignore[misc]
        self.retry_after_s = retry_after_s


class NotReady(RequestError):
    """The daemon is starting, draining, paused, asleep or failed."""

    status, type, code = 503, "service_unavailable_error", "not_ready"

    def __init__(self, state: str, reason: str = "", retry_after_s: int = 1) -> None:
        super().__init__(f"the server is {state}" + (f": {reason}" if reason else ""), code=state)
        self.retry_after_s = retry_after_s


class AdapterUnavailable(RequestError):
    """The adapter's weights were evicted and cannot be read again from its files. The message states the reason."""

    status, type, code, param = 503, "service_unavailable_error", "adapter_unavailable", "model"


class QueueTimeout(RequestError):
    """The request waited too long for its first step. Nothing was computed for the request."""

    status, type, code, retry_after_s = 503, "overloaded_error", "queue_timeout", 5

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request waited {limit_s:g} s in the queue (server.queue_timeout_s); the server is busy")


class RequestTimeout(RequestError):
    status, type, code = 504, "timeout_error", "request_timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request took {limit_s:g} s (server.request_timeout_s); request fewer tokens")


class Aborted(RequestError):
    """An operator aborted the request before it was queued."""

    status, type, code = 503, "service_unavailable_error", "aborted"

    def __init__(self) -> None:
        super().__init__("an operator aborted this request")


class ServerStopped(RequestError):
    """The daemon stops before the request is finished; another daemon may answer a retry."""

    status, type, code, retry_after_s = 503, "service_unavailable_error", "draining", 1

    def __init__(self) -> None:
        super().__init__("the server stopped before this request was finished")


class NotStored(RequestError):
    """The store's file failed, for example because its disk is full. Requests that store nothing are unaffected."""

    status, type, code = 507, "insufficient_storage_error", "not_stored"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the server cannot store or read this ({reason}); with store: false a response is not stored")


class TooManyEvents(RequestError):
    status, type, code = 507, "insufficient_storage_error", "too_many_events"

    def __init__(self) -> None:
        super().__init__("the events of all responses in the background exceed store.bytes; this was the oldest")


class UnknownVersion(RequestError):
    status, code, closes = 505, "http_version_not_supported", True

    def __init__(self) -> None:
        super().__init__("the versions of HTTP known here are 1.1 and 1.0")


class Internal(RequestError):
    status, type, code = 500, "internal_error", "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"internal error; the server's log has the details under request {request_id}")


class AdapterExists(InfdError):
    """The name already belongs to another adapter, or to the model."""


class AdapterTooLarge(InfdError):
    """An adapter exceeds the free memory for adapters. `size` and `room` are in bytes."""

    def __init__(self, size: int, room: int) -> None:
        self.size = size
        super().__init__(
            f"the adapter takes {size / 2**20:,.1f} MiB; {max(0, room) / 2**20:,.1f} MiB are free for adapters:"
            " unload others, or raise lora.host_bytes"
        )


class TextFailed(InfdError):
    """A chat template, tokenizer or constraint failed unexpectedly: a library failed, or the worker process ended."""


class RequestFailed(InfdError):
    """infd could not finish an accepted request. The last event of the request's stream contains the error."""


class WrongState(InfdError):
    """The daemon's state does not permit the admin verb."""

    def __init__(self, state: str, reason: str = "", advice: str = "see `infdctl status`") -> None:
        super().__init__(f"the daemon is {state}{f' ({reason})' if reason else ''}; {advice}")


class Busy(InfdError):
    """A load of weights is refused, because another load of weights is running."""


class CannotSleep(InfdError):
    """The device cannot release memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this daemon cannot sleep: {reason}; `infdctl pause` stops steps and keeps memory")


class WeightsInvalid(InfdError):
    """A load of weights failed midway, so the weights in memory are from two checkpoints. No step may run."""

    def __init__(self) -> None:
        super().__init__("the weights are invalid: load good ones with `infdctl load-weights PATH`, or restart")


class Overtaken(InfdError):
    """The transition was superseded by a later admin verb, or by shutdown."""

    def __init__(self, state: str) -> None:
        super().__init__(f"overtaken: the daemon was told meanwhile to be {state}; see `infdctl status`")


class StepTooLarge(InfdError):
    """The device ran out of memory in a step. The engine retries the step's sequences in smaller steps."""


class DeviceLost(InfdError):
    """The device is unusable; this process cannot run another step."""

    exit_code: ClassVar[int] = os.EX_SOFTWARE


class NotAnswered(InfdError):
    """The server is unreachable, refused the request, or ended its answer early. The message states which."""

    exit_code: ClassVar[int] = os.EX_UNAVAILABLE


class RequestRefused(NotAnswered):
    """The server answered 400: the message, the schema or an option has to change."""

    exit_code = os.EX_DATAERR


class KeyRefused(NotAnswered):
    """The server refused the API key, or asks for a key."""

    exit_code = os.EX_NOPERM


class StartError(InfdError):
    """The daemon cannot start. `exit_code` is a code of sysexits.h."""

    exit_code: ClassVar[int] = os.EX_SOFTWARE


class UsageError(StartError):
    exit_code = os.EX_USAGE


class InputMalformed(StartError):
    """A file named on the command line is malformed."""

    exit_code = os.EX_DATAERR


class DeviceMissing(StartError):
    exit_code = os.EX_UNAVAILABLE


class OutOfMemory(StartError):
    exit_code = os.EX_OSERR


class AddressUnavailable(StartError):
    exit_code = os.EX_OSERR

    def __init__(self, host: str, port: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        super().__init__(f"cannot listen on {host} port {port}: {reason}; choose another with --host or --port")


class SocketTaken(StartError):
    exit_code = os.EX_OSERR


class FetchFailed(StartError):
    exit_code = os.EX_IOERR


class OutputFailed(StartError):
    """A file that a command writes cannot be written, for example because the disk is full."""

    exit_code = os.EX_IOERR


class CheckpointError(StartError):
    exit_code = os.EX_CONFIG


class ConfigError(StartError):
    exit_code = os.EX_CONFIG


class Foreign(Exception):
    """An exception from another process, where it was not an InfdError. The message states its type and text."""


class Fault(Struct, frozen=True):
    """An error as plain values.

    code        class name of an InfdError; empty for any other exception
    attributes  the error's attributes that are numbers, strings or None
    """

    code: str
    message: str
    attributes: dict[str, int | float | str | None] = {}

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Return `error` as a Fault."""
        if not isinstance(error, InfdError):
            return cls("", f"{type(error).__name__}: {error}")
        plain = {name: value for name, value in vars(error).items() if isinstance(value, int | float | str | None)}
        return cls(type(error).__name__, str(error), plain)

    def error(self) -> Exception:
        """Return the error again, without cause and traceback; a Foreign if `code` names no InfdError."""
        kind = _kinds(InfdError).get(self.code)
        if kind is None:
            return Foreign(self.message)
        error = kind.__new__(kind, self.message)
        vars(error).update(self.attributes)
        return error


def _kinds(of: type[InfdError]) -> dict[str, type[InfdError]]:
    return {of.__name__: of} | {name: kind for each in of.__subclasses__() for name, kind in _kinds(each).items()}
