"""Every deliberate error, with the HTTP status or exit code it becomes.

InfdError
├── RequestError           a client can fix it, or try later; carries an HTTP status
│   ├── InvalidRequest     400
│   │   ├── InvalidHttp    400 invalid_http; the connection is closed
│   │   └── TooCostly      400, what a checkpoint's text does with this request reached a limit
│   ├── PromptTooLong      400 context_length_exceeded
│   ├── NothingAllowed     400, found out while generating
│   ├── Unsupported        400, names the feature
│   ├── Unauthorized       401
│   ├── ModelNotFound      404
│   ├── UnknownPath        404
│   ├── MethodNotAllowed   405
│   ├── BodyTooLarge       413
│   ├── UnknownExpectation 417
│   ├── Overloaded         429, with Retry-After
│   ├── NotReady           503, with Retry-After
│   ├── AdapterUnavailable 503, its files are gone, changed, or too large by now
│   ├── QueueTimeout       503, with Retry-After
│   ├── RequestTimeout     504
│   ├── Aborted            503, an operator's doing
│   ├── ServerStopped      503, with Retry-After
│   ├── UnknownVersion     505, of HTTP; the connection is closed
│   └── Internal           500, our bug; the message names the request id
├── AdapterExists          another stands under that name
├── AdapterTooLarge        there is no room for it beside the others
├── TextFailed             a checkpoint's text failed as nobody foresaw, or ended the process that it ran in
├── RequestFailed          an accepted request ended in an error of ours (its terminal event)
├── WrongState             an operator's wish that cannot be begun now
├── Busy                   an operator's wish that waits for another one to end
├── CannotSleep            memory cannot be given back on this device
├── WeightsInvalid         no step may run with these weights
├── Overtaken              an operator's wish that a later one, or the end, has taken the place of
├── StepTooLarge           a step did not fit the device's memory; smaller ones may
├── DeviceLost             the device cannot be used any more; the daemon exits 70
├── NotAnswered            what `infd chat` asked a server; exit code 69
└── StartError             the daemon cannot start; carries a sysexits code
    ├── UsageError         64
    ├── DeviceMissing      69
    ├── OutOfMemory        71
    ├── AddressUnavailable 71
    ├── SocketTaken        71, another daemon serves there
    ├── FetchFailed        74, a model that a hub does not hand over now; later it may
    ├── CheckpointError    78, names file, tensor, expected and found
    └── ConfigError        78

A Fault is an error as plain values: it lasts in a step's result, and crosses to another process.
"""

from __future__ import annotations

import os
from typing import ClassVar, TypeVar

from msgspec import Struct

Error = TypeVar("Error", bound=BaseException)


def brief(text: str) -> str:
    """Return as much of a client's words as an error repeats."""
    return text if len(text) <= 100 else text[:100] + "..."


def without_frames(error: Error) -> Error:
    """Return an error that has been logged, or needs no log, without where it was raised.

    Whoever keeps an error keeps the frames that it passed through, and a request's body and tokens with them.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class InfdError(Exception):
    """Any error that infd raises on purpose."""


class RequestError(InfdError):
    """Answered to one client as `{"error": {message, type, param, code}}`; costs nobody else anything."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    closes: ClassVar[bool] = False  # the connection: where the next request begins is not known

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param if param is not None else type(self).param
        self.code = code if code is not None else type(self).code


class InvalidRequest(RequestError):
    """Malformed, of the wrong type, out of range, or contradictory."""


class InvalidHttp(InvalidRequest):
    """The bytes are not a request, or not one whose end is certain."""

    code, closes = "invalid_http", True


class TooCostly(InvalidRequest):
    """What a checkpoint's text (a chat template, a tokenizer) does with this request reached a limit."""


class PromptTooLong(RequestError):
    code, param = "context_length_exceeded", "messages"

    def __init__(self, tokens: int, limit: int, *, at_least: bool = False, param: str | None = None) -> None:
        size = f"at least {tokens}" if at_least else tokens
        super().__init__(f"the prompt is {size} tokens; this model reads at most {limit}", param=param)


class NothingAllowed(RequestError):
    """What the request forbids, all together, leaves no token to choose."""

    code = "nothing_allowed"

    def __init__(self) -> None:
        super().__init__(
            "logit_bias, min_tokens, bad_words, allowed_token_ids and the grammar leave no token to choose"
        )


class Unsupported(RequestError):
    """A known field whose value asks for something this server or model does not do."""

    code = "unsupported"

    def __init__(self, feature: str, *, param: str | None = None) -> None:
        super().__init__(f"{feature} is not supported", param=param)


class Unauthorized(RequestError):
    status, code = 401, "invalid_api_key"


class ModelNotFound(RequestError):
    status, code, param = 404, "model_not_found", "model"

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"model {brief(name)!r} is not served here; served: {', '.join(known)}")


class UnknownPath(RequestError):
    status, code = 404, "unknown_path"


class MethodNotAllowed(RequestError):
    status, code = 405, "method_not_allowed"


class BodyTooLarge(RequestError):
    status, code = 413, "body_too_large"


class UnknownExpectation(RequestError):
    status, code = 417, "unknown_expectation"


class Overloaded(RequestError):
    """The queue is full. Refused before any work was spent on the request."""

    status, type, code, retry_after_s = 429, "overloaded_error", "queue_full", 1


class NotReady(RequestError):
    """Starting, draining, paused, asleep or failed."""

    status, type, code = 503, "service_unavailable_error", "not_ready"

    def __init__(self, state: str, reason: str = "", retry_after_s: int = 1) -> None:
        super().__init__(f"the server is {state}" + (f": {reason}" if reason else ""), code=state)
        self.retry_after_s = retry_after_s


class AdapterUnavailable(RequestError):
    """It is served here, but cannot be read now. The message says what an operator can do."""

    status, type, code, param = 503, "service_unavailable_error", "adapter_unavailable", "model"


class QueueTimeout(RequestError):
    """It waited too long for its first step. Nothing was computed for it."""

    status, type, code, retry_after_s = 503, "overloaded_error", "queue_timeout", 5

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request waited {limit_s:g} s in the queue, as long as one may; the server is busy")


class RequestTimeout(RequestError):
    status, type, code = 504, "timeout_error", "request_timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request took {limit_s:g} s, as long as one may; ask for fewer tokens")


class Aborted(RequestError):
    """An operator ended the request before it was queued."""

    status, type, code = 503, "service_unavailable_error", "aborted"

    def __init__(self) -> None:
        super().__init__("an operator aborted this request")


class ServerStopped(RequestError):
    """The daemon is going away before the request is finished; another one may answer it."""

    status, type, code, retry_after_s = 503, "service_unavailable_error", "draining", 1

    def __init__(self) -> None:
        super().__init__("the server stopped before this request was finished")


class UnknownVersion(RequestError):
    status, code, closes = 505, "http_version_not_supported", True

    def __init__(self) -> None:
        super().__init__("the versions of HTTP known here are 1.1 and 1.0")


class Internal(RequestError):
    status, type, code = 500, "internal_error", "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"internal error; the server's log has the details under request {request_id}")


class AdapterExists(InfdError):
    """The name asked for stands for something else."""


class AdapterTooLarge(InfdError):
    """An adapter does not fit into the memory that there is for adapters."""

    def __init__(self, size: int, room: int) -> None:
        self.size = size  # bytes
        super().__init__(
            f"the adapter takes {size / 2**20:,.1f} MiB; {max(0, room) / 2**20:,.1f} MiB are free for adapters:"
            " unload others, or raise lora.host_bytes"
        )


class TextFailed(InfdError):
    """A checkpoint's text failed as nobody foresaw: a library panicked over it, or it ended the worker."""


class RequestFailed(InfdError):
    """An accepted request that infd could not finish; its stream ends with this."""


class WrongState(InfdError):
    """What an operator wishes cannot be begun in this state."""

    def __init__(self, state: str, reason: str = "", advice: str = "see `infdctl status`") -> None:
        super().__init__(f"the daemon is {state}{f' ({reason})' if reason else ''}; {advice}")


class Busy(InfdError):
    """Something of which there can be one at a time is under way."""


class CannotSleep(InfdError):
    """The device keeps its memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this daemon cannot sleep: {reason}; `infdctl pause` stops steps and keeps memory")


class WeightsInvalid(InfdError):
    """Reading weights into place has failed midway."""

    def __init__(self) -> None:
        super().__init__("the weights are invalid: load good ones with `infdctl load-weights PATH`, or restart")


class Overtaken(InfdError):
    """Another operator wished otherwise meanwhile, or the daemon ends."""

    def __init__(self, state: str) -> None:
        super().__init__(f"overtaken: the daemon was told meanwhile to be {state}; see `infdctl status`")


class StepTooLarge(InfdError):
    """The device had no memory for a step. Its sequences are tried again in smaller steps."""


class DeviceLost(InfdError):
    """The executor is poisoned: nothing more can be computed in this process."""

    exit_code: ClassVar[int] = os.EX_SOFTWARE


class NotAnswered(InfdError):
    """No server answers, or it refuses, or it breaks off. The message says what to do next."""

    exit_code: ClassVar[int] = os.EX_UNAVAILABLE


class StartError(InfdError):
    """The daemon cannot start. The message says what to do next."""

    exit_code: ClassVar[int] = os.EX_SOFTWARE


class UsageError(StartError):
    exit_code = os.EX_USAGE


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


class CheckpointError(StartError):
    exit_code = os.EX_CONFIG


class ConfigError(StartError):
    exit_code = os.EX_CONFIG


class Foreign(Exception):
    """An exception of another process that is none of the above; its message is that one's type and words."""


class Fault(Struct, frozen=True):
    """An error as plain values.

    code        class of an InfdError; empty for any other exception
    attributes  numbers and texts that the error carries besides its message
    """

    code: str
    message: str
    attributes: dict[str, int | float | str | None] = {}

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Return an error's code, message, and attributes that are numbers or texts."""
        if not isinstance(error, InfdError):
            return cls("", f"{type(error).__name__}: {error}")
        plain = {name: value for name, value in vars(error).items() if isinstance(value, int | float | str | None)}
        return cls(type(error).__name__, str(error), plain)

    def error(self) -> Exception:
        """Return the error again, without its cause and traceback."""
        kind = _kinds(InfdError).get(self.code)
        if kind is None:
            return Foreign(self.message)
        error = kind.__new__(kind, self.message)
        vars(error).update(self.attributes)
        return error


def _kinds(of: type[InfdError]) -> dict[str, type[InfdError]]:
    return {of.__name__: of} | {name: kind for each in of.__subclasses__() for name, kind in _kinds(each).items()}
