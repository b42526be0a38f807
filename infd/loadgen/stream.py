"""Time one answer, streamed or whole.

A search of a line's bytes decides whether the line carries text. Only lines with
usage or an error are decoded as JSON. So the generator takes little CPU time from
the server under measurement.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from infd.loadgen.connections import NotConnected
from infd.loadgen.samples import Sample
from infd.sockets.tls import failed_handshake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    import aiohttp

    from infd.loadgen.connections import Answer, Connections

    Reader = Callable[[Answer, float, list[bytes] | None], Awaitable[Sample]]

# A delta's key with a non-empty string. Quotes inside a text are escaped, so a text cannot match.
_TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|arguments)"\s*:\s*"[^"]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"(\w+)')
_ERROR = re.compile(rb'data:\s*\{\s*"error"\s*:')


NO_TLS: Final = "no TLS connection"  # a kind of failure


class RequestFailed(Exception):
    """A request received no complete answer.

    kind    kind under which the report counts the failure
    status  status of the HTTP response; None: no response
    """

    def __init__(self, kind: str, detail: str = "", status: int | None = None) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.status = status


class PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class _Pooled(Struct):
    usage: Usage | None = None


class _Chunk(Struct):
    usage: Usage


class _Error(Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(Struct):
    error: _Error


def not_connected(error: aiohttp.ClientConnectorError, url: str = "") -> RequestFailed:
    """Return the failure of a connection with the system's reason, without aiohttp's and asyncio's additions."""
    return unreachable(getattr(error, "certificate_error", error.os_error), url)


def unreachable(failed: Exception, url: str = "") -> RequestFailed:
    """Return the failure of a connection for the error of TLS or of the system."""
    if isinstance(failed, ssl.SSLError):
        return RequestFailed(NO_TLS, (f"{url} answers, but " if url else "") + failed_handshake(failed))
    number = getattr(failed, "errno", None)
    reason = os.strerror(number) if number and number > 0 else str(failed)
    return RequestFailed("unreachable", (f"{url}: " if url else "") + reason)


async def read_events(answer: Answer, due: float, lines: list[bytes] | None) -> Sample:
    """Read a streamed answer. Arguments as `measure`'s. Raises RequestFailed."""
    return await read(answer.pieces(), due, lines)


async def read_document(answer: Answer, due: float, lines: list[bytes] | None) -> Sample:
    """Read an answer that is one JSON document without text. Arguments as `measure`'s. Raises RequestFailed."""
    document = await answer.read()
    ended = time.perf_counter()
    try:
        usage = msgspec.json.decode(document, type=_Pooled).usage
    except msgspec.MsgspecError as error:
        raise RequestFailed("no usage", str(error)) from None
    return Sample(
        ttft_s=ended - due,
        e2e_s=ended - due,
        gaps_s=[],
        input_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=0,
        counted=usage is not None,
    )


async def measure(
    connections: Connections,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    due: float,
    lines: list[bytes] | None = None,
    *,
    reader: Reader = read_events,
) -> Sample:
    """Send a request, and read the whole answer.

    due     time at which to send the request (`time.perf_counter()`). Latencies count from `due`, even if the request
            is sent later
    lines   receives the lines that carry text, for `text_of`
    reader  reads the answer

    Raises RequestFailed.
    """
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(connections.timeout_s):
            answer = await connections.post(url, body, headers)
            try:
                if answer.status != 200:
                    raise refusal(answer.status, await answer.read())
                sample = await reader(answer, due, lines)
            finally:
                answer.close()
    except TimeoutError:
        raise RequestFailed("timeout") from None
    except NotConnected as error:
        raise unreachable(error.reason) from None
    except OSError as error:
        raise RequestFailed("disconnected", repr(error)) from None
    sample.queued_s = max(0.0, sent - due)
    return sample


async def read(
    pieces: AsyncIterator[bytes],
    due: float,
    kept: list[bytes] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sample:
    """Read a streamed answer to its end. Arguments as `measure`'s; `clock` tells the time. Raises RequestFailed."""
    arrivals: list[float] = []
    usage: Usage | None = None
    done, finish = False, ""
    tail = b""
    async for piece in pieces:
        now = clock()
        *lines, tail = (tail + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if _TEXT.search(line):
                arrivals.append(now)
                if kept is not None:
                    kept.append(line[5:])
            if _USAGE.search(line):
                usage = _usage(line)
            elif _ERROR.match(line):
                raise refusal(200, line[5:])
            # A finish reason or [DONE] marks the end: some servers omit [DONE], others send usage between the two.
            if found := _FINISHED.search(line):
                done, finish = True, found[1].decode()
            elif line[5:].strip() == b"[DONE]":
                done = True
    ended = clock()
    if not done:
        raise RequestFailed("truncated", "the stream ended without a finish reason and without [DONE]")
    if not arrivals:
        raise RequestFailed("no text", _why_silent(usage))
    details = usage.prompt_tokens_details if usage else None
    return Sample(
        ttft_s=arrivals[0] - due,
        e2e_s=ended - due,
        gaps_s=[later - earlier for earlier, later in pairwise(arrivals)],
        input_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=usage.completion_tokens if usage else len(arrivals),
        counted=usage is not None,
        cached_tokens=details.cached_tokens if details else None,
        finish=finish,
    )


def text_of(lines: list[bytes]) -> str:
    """Return the text of an answer's lines, without its thoughts. Raises RequestFailed."""
    try:
        choices = [choice for line in lines for choice in msgspec.json.decode(line, type=_Texts).choices]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestFailed("malformed event", str(error)) from None
    return "".join(choice.text or (choice.delta.content if choice.delta else None) or "" for choice in choices)


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Texts(Struct):
    choices: list[_Choice] = []


def _why_silent(usage: Usage | None) -> str:
    tokens = usage.completion_tokens if usage else 0
    if tokens > 1:
        return f"the answer's {tokens} tokens are no text (special ones, or parts of characters); ask for more tokens"
    return "the model ended its answer at once; --ignore-eos asks it to go on"


def _usage(line: bytes) -> Usage | None:
    try:
        return msgspec.json.decode(line[5:], type=_Chunk).usage
    except msgspec.MsgspecError:
        return None


def refusal(status: int, body: bytes) -> RequestFailed:
    """Return a RequestFailed for an OpenAI error body; status 200 is an error event inside a stream."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = _Error(body[:200].decode(errors="replace"))
    kind = f"http {status}" if status != 200 else "error event"
    return RequestFailed(f"{kind} {error.code or error.type or ''}".strip(), error.message, status)
