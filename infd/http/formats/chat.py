"""An answer as chat.completion and chat.completion.chunk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from infd.http.formats.base import PLACE, around, explain_prompt, finite, readable, usage
from infd.http.formats.timings import timings
from infd.http.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatResponse,
    ReplyMessage,
    TopLogprob,
)
from infd.http.sse import event

if TYPE_CHECKING:
    from msgspec import UnsetType

    from infd.engine.ticket import Ticket
    from infd.http.answer import Part
    from infd.http.schema.chat import ChatRequest
    from infd.http.schema.logprobs import PromptLogprobs
    from infd.http.schema.usage import Usage
    from infd.text.tokenizer import Tokenizer


class ChatFormat:
    """The words of POST /v1/chat/completions."""

    def __init__(
        self, request: ChatRequest, ticket: Ticket, *, model: str, tokenizer: Tokenizer, prompt: tuple[int, ...]
    ) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._logprobs = bool(request.logprobs)
        self._most = request.prompt_logprobs or 0
        self._show_ids = bool(request.return_token_ids)
        self._ticket = ticket
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._id = f"chatcmpl-{ticket.id}"
        self._created = int(time.time())
        self._model = model
        self._only_text = not (self._logprobs or self._show_ids or self._running_usage)
        self._begun: set[int] = set()
        self._frames = [
            around(self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=PLACE))))
            for index in range(request.n or 1)
        ]

    def events(self, parts: list[Part]) -> bytes:
        pieces: list[bytes] = []
        for part in parts:
            if part.index not in self._begun:
                self._begun.add(part.index)
                pieces.append(self._opening_event(part))
            if part.finish is None and self._only_text:
                if part.text:
                    before, after = self._frames[part.index]
                    pieces += before, msgspec.json.encode(part.text), after
            else:
                pieces.append(self._event(part))
        return b"".join(pieces)

    def closing_events(self) -> bytes:
        if not self._include_usage:
            return b""
        chunk = self._chunk(None)
        chunk.usage = usage(self._ticket)
        chunk.timings = timings(self._ticket)
        return event(msgspec.json.encode(chunk))

    def whole(self, parts: list[Part]) -> bytes:
        choices = [
            ChatChoice(
                index=part.index,
                message=ReplyMessage(content=part.text),
                logprobs=self._explain(part),
                finish_reason=part.finish.value if part.finish else "",
                stop_reason=part.stop_reason,
                token_ids=part.token_ids if self._show_ids else UNSET,
            )
            for part in parts
        ]
        return msgspec.json.encode(
            ChatResponse(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage(self._ticket),
                timings=timings(self._ticket),
                prompt_token_ids=list(self._prompt) if self._show_ids else UNSET,
                prompt_logprobs=self._explain_prompt(parts[0]),
            )
        )

    def _opening_event(self, part: Part) -> bytes:
        chunk = self._chunk(ChatChunkChoice(index=part.index, delta=ChatDelta(role="assistant", content="")))
        if self._show_ids:
            chunk.prompt_token_ids = list(self._prompt)
        chunk.prompt_logprobs = self._explain_prompt(part)
        return event(msgspec.json.encode(chunk))

    def _event(self, part: Part) -> bytes:
        choice = ChatChunkChoice(
            index=part.index,
            delta=ChatDelta(content=part.text or UNSET),
            logprobs=self._explain(part),
        )
        if self._show_ids:
            choice.token_ids = part.token_ids
        if part.finish is not None:
            choice.finish_reason = part.finish.value
            choice.stop_reason = part.stop_reason
        return event(msgspec.json.encode(self._chunk(choice)))

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        cost: Usage | UnsetType | None = UNSET
        if self._running_usage:
            cost = usage(self._ticket)
        elif self._include_usage:
            cost = None
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[] if choice is None else [choice],
            usage=cost,
        )

    def _explain_prompt(self, part: Part) -> PromptLogprobs | UnsetType:
        """Tell it once, with the first choice."""
        if part.prompt_logprobs is None or part.index:
            return UNSET
        return explain_prompt(self._prompt, part.prompt_logprobs, self._most, self._tokenizer)

    def _explain(self, part: Part) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        piece = self._tokenizer.piece
        content = []
        for token_id, logprobs in zip(part.token_ids, part.logprobs, strict=True):
            assert logprobs is not None  # a chat echoes nothing
            chosen = piece(token_id)
            likely = [
                TopLogprob(token=readable(text), logprob=finite(logprob), bytes=list(text))
                for text, logprob in zip(map(piece, logprobs.top_ids), logprobs.top, strict=True)
            ]
            content.append(
                ChatLogprob(
                    token=readable(chosen), logprob=finite(logprobs.chosen), bytes=list(chosen), top_logprobs=likely
                )
            )
        return ChatLogprobs(content=content)
