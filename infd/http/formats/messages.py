"""Encode an answer as a message of Anthropic's API, whole or as events.

Content is a list of blocks: a block ends where another kind of content begins. The same code builds the blocks of a
stream and of a whole answer. Thoughts have blocks only if the request asks for thoughts. In this API the arguments of
a call are a JSON object, so any other text that the model writes as arguments is converted to an object
(text/json_object.py).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, Raw

from infd.http.formats.base import TEXT_PLACEHOLDER, named_event
from infd.http.formats.ordered import CallPart, ContentPart, ThoughtPart, parts
from infd.http.schema.anthropic import (
    MessageError,
    MessageErrorDetail,
    MessageUsage,
    OutputBlock,
    OutputMessage,
    OutputTokensDetails,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from infd.request import FinishReason
from infd.text.json_object import JsonObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.errors import RequestError
    from infd.http.answer import ChoiceDelta
    from infd.http.formats.base import Accepted
    from infd.http.formats.ordered import Part
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.http.rates import Standing
    from infd.http.schema.anthropic import MessagesRequest

ANTHROPIC_VERSION: Final = "anthropic-version"  # request header that every client of Anthropic's API sends
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.ABORT: "pause_turn",  # an operator ended the answer; the client may send it back to be continued
    FinishReason.ERROR: "refusal",
}


class MessagesErrors:
    """Errors as `{"type": "error", "error": {type, message}}`. The message names the wrong field."""

    request_id_header = "request-id"

    def error_body(self, error: RequestError) -> bytes:
        message = str(error)
        if error.param and error.param not in message:
            message = f"{error.param}: {message}"
        detail = MessageErrorDetail(type=_ERROR_TYPES.get(error.status, "invalid_request_error"), message=message)
        return msgspec.json.encode(MessageError(error=detail))

    def rate_headers(self, standings: Sequence[Standing]) -> dict[str, str]:
        headers: dict[str, str] = {}
        for standing in standings:
            reset = datetime.now(UTC) + timedelta(seconds=standing.reset_s)
            name = f"anthropic-ratelimit-{standing.unit}"
            headers[f"{name}-limit"] = str(standing.limit)
            headers[f"{name}-remaining"] = str(standing.remaining)
            headers[f"{name}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
        return headers

    def error_events(self, error: RequestError) -> bytes:
        return named_event("error", self.error_body(error))


MESSAGES_ERRORS: Final = MessagesErrors()


class _OpenBlock:
    """The last block of an answer, which further deltas extend.

    delta  type of the block's deltas, and the name of their text field
    texts  the text of its deltas
    """

    def __init__(self, index: int, block: OutputBlock, delta: tuple[str, str]) -> None:
        self.index = index
        self.block = block
        self.json = JsonObject() if isinstance(block, ToolUseBlock) else None
        self.texts: list[str] = []
        kind, field = delta
        self._frame = _event("content_block_delta", index=index, delta={"type": kind, field: TEXT_PLACEHOLDER}).split(
            msgspec.json.encode(TEXT_PLACEHOLDER)
        )

    def delta(self, text: str) -> bytes:
        self.texts.append(text)
        return msgspec.json.encode(text).join(self._frame)


class MessagesFormat(MessagesErrors):
    """The format of POST /v1/messages."""

    folds = False

    def __init__(self, request: MessagesRequest, accepted: Accepted) -> None:
        thinking = request.thinking
        self._shows_thoughts = thinking is not None and thinking.type != "disabled"
        self._omits_thoughts = thinking is not None and thinking.display == "omitted"
        self._ticket = accepted.ticket
        self._model = accepted.model
        (prompt,) = accepted.prompts
        self._cut = len(prompt) + request.max_tokens > accepted.context_tokens
        self._thought_tokens = 0
        self._begun = False
        self._block: _OpenBlock | None = None
        self._content: list[OutputBlock] = []  # the blocks that have ended
        self._blank = ""  # leading white space of a block, held back; dropped if no text follows
        self._signature = blake2b(digest_size=32)
        self._called = False
        self._reason: str | None = None
        self._sequence: str | None = None

    def events(self, delta: ChoiceDelta) -> Pieces:
        block = self._block
        if delta.aside is None and delta.finish is None and block is not None and type(block.block) is TextBlock:
            return [block.delta(delta.text)] if delta.text else []
        events: Pieces = []
        if not self._begun:
            self._begun = True
            message = self._message([], None, unsent=len(delta.token_ids))
            events.append(_event("message_start", message=message))
        self._count(delta)
        for part in parts(delta):
            events += self._part_events(part)
        if delta.finish is not None:
            self._finish(delta)
        return events

    def last_events(self) -> bytes:
        ended = {"stop_reason": self._reason, "stop_sequence": self._sequence}
        return b"".join(
            (
                *self._end_block(),
                _event("message_delta", delta=ended, usage=self._usage()),
                _event("message_stop"),
            )
        )

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        return {}

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        (choice,) = choices
        self.events(choice.delta)
        list(self._end_block())
        return [msgspec.json.encode(self._message(self._content, self._reason))]

    def _part_events(self, part: Part) -> Iterator[bytes]:
        match part:
            case ThoughtPart(text=text):
                if self._shows_thoughts:
                    if self._block is None or not isinstance(self._block.block, ThinkingBlock):
                        yield from self._open(ThinkingBlock(thinking="", signature=""), "thinking_delta", "thinking")
                    self._signature.update(text.encode())
                    if self._block is not None and not self._omits_thoughts:
                        yield self._block.delta(text)
            case ContentPart(text=text):
                if self._block is None or not isinstance(self._block.block, TextBlock):
                    text, self._blank = self._blank + text, ""
                    if text.isspace():
                        self._blank = text
                        return
                    yield from self._open(TextBlock(text=""), "text_delta", "text")
                if self._block is not None:
                    yield self._block.delta(text)
            case CallPart(begun=begun, arguments=arguments):
                if begun is not None:
                    self._called = True
                    tool = ToolUseBlock(id=begun.id or "", name=begun.name or "", input=Raw(b"{}"))
                    yield from self._open(tool, "input_json_delta", "partial_json")
                block = self._block
                if block is not None and block.json is not None and (certain := block.json.feed(arguments)):
                    yield block.delta(certain)

    def _open(self, block: OutputBlock, kind: str, field: str) -> Iterator[bytes]:
        yield from self._end_block()
        self._blank = ""
        self._block = _OpenBlock(len(self._content), block, (kind, field))
        yield _event("content_block_start", index=self._block.index, content_block=block)

    def _end_block(self) -> Iterator[bytes]:
        opened = self._block
        if opened is None:
            return
        if opened.json is not None and (rest := opened.json.finish()):
            yield opened.delta(rest)
        text = "".join(opened.texts)
        match opened.block:
            case TextBlock() as block:
                block.text = text
            case ToolUseBlock() as block:
                block.input = Raw(text.encode())
            case ThinkingBlock() as block:
                block.thinking, block.signature = text, self._signature.copy().hexdigest()
                signed = {"type": "signature_delta", "signature": block.signature}
                yield _event("content_block_delta", index=opened.index, delta=signed)
        yield _event("content_block_stop", index=opened.index)
        self._content.append(opened.block)
        self._block = None

    def _count(self, delta: ChoiceDelta) -> None:
        if delta.aside is not None:
            self._thought_tokens += delta.aside.thought_tokens

    def _finish(self, delta: ChoiceDelta) -> None:
        assert delta.finish is not None
        self._reason = _REASONS[delta.finish]
        if delta.finish is FinishReason.STOP and isinstance(delta.stop_reason, str):
            self._reason, self._sequence = "stop_sequence", delta.stop_reason
        elif delta.finish is FinishReason.STOP and self._called:
            self._reason = "tool_use"
        elif delta.finish is FinishReason.LENGTH and self._cut:
            self._reason = "model_context_window_exceeded"

    def _message(self, blocks: list[OutputBlock], reason: str | None, unsent: int = 0) -> OutputMessage:
        return OutputMessage(
            id=f"msg_{self._ticket.id}",
            model=self._model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=self._sequence,
            usage=self._usage(unsent),
        )

    def _usage(self, unsent: int = 0) -> MessageUsage:
        ticket, thought = self._ticket, self._thought_tokens
        return MessageUsage(
            input_tokens=ticket.prompt_tokens - ticket.cached_tokens,
            cache_read_input_tokens=ticket.cached_tokens,
            output_tokens=ticket.generated_tokens - unsent,
            output_tokens_details=OutputTokensDetails(thinking_tokens=thought) if thought else UNSET,
        )


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, msgspec.json.encode({"type": kind, **fields}))
