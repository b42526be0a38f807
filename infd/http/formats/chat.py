"""An answer as chat.completion and chat.completion.chunk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import UNSET

from infd.http.formats.base import PIECE_TOKENS, PLACE, around, explain_prompt, finite, framed, readable, usage
from infd.http.formats.timings import timings
from infd.http.pieces import array, batched, elements, filled, hole
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
from infd.http.schema.tools import FunctionDelta, ReplyCall, ReplyCallDelta, ReplyFunction
from infd.http.sse import event
from infd.request import FinishReason

if TYPE_CHECKING:
    from msgspec import UnsetType

    from infd.engine.admission.ticket import Ticket
    from infd.http.answer import Part
    from infd.http.pieces import Pieces
    from infd.http.schema.chat import ChatRequest
    from infd.http.schema.logprobs import PromptLogprobs
    from infd.http.schema.usage import Usage
    from infd.request import TokenLogprobs
    from infd.text.markup import CallDelta
    from infd.text.tokenizer import Tokenizer


class ChatFormat:
    """The words of POST /v1/chat/completions."""

    def __init__(
        self,
        request: ChatRequest,
        ticket: Ticket,
        *,
        model: str,
        tokenizer: Tokenizer,
        prompt: tuple[int, ...],
        marked_up: bool = False,
    ) -> None:
        """Answer a request. Where its answers may be `marked_up`, there may be no content at all: then it is null."""
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
        self._empty = None if marked_up else ""
        self._show_thoughts = request.include_reasoning is not False
        self._thought_tokens = 0
        self._calling: set[int] = set()
        self._begun: set[int] = set()
        self._frames = self._around(ChatDelta(content=PLACE), request.n or 1)
        self._thought_frames = (
            self._around(ChatDelta(reasoning_content=PLACE, reasoning=PLACE), request.n or 1) if marked_up else []
        )

    def events(self, part: Part) -> Pieces:
        if part.index not in self._begun:
            self._begun.add(part.index)
            return self._opening_event(part) + self.events(part)
        if part.finish is None and part.aside is None and self._only_text:
            return [msgspec.json.encode(part.text).join(self._frames[part.index])] if part.text else []
        self._note(part)
        if part.finish is None and self._only_text and (thought := self._thought_alone(part)):
            return [msgspec.json.encode(thought).join(self._thought_frames[part.index])]
        return self._event(part) if self._shows(part) or not self._only_text else []

    def closing_events(self) -> bytes:
        if not self._include_usage:
            return b""
        chunk = self._chunk(None)
        chunk.usage = usage(self._ticket, self._thought_tokens)
        chunk.timings = timings(self._ticket)
        return event(msgspec.json.encode(chunk))

    def whole(self, parts: list[Part]) -> Pieces:
        for part in parts:
            self._note(part)
        fillings = {"choices": array(*map(self._choice, parts))}
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=hole("choices"),
            usage=usage(self._ticket, self._thought_tokens),
            timings=timings(self._ticket),
            prompt_token_ids=list(self._prompt) if self._show_ids else UNSET,
            prompt_logprobs=self._explain_prompt(parts[0], fillings),
        )
        return filled(response, fillings)

    def _choice(self, part: Part) -> Pieces:
        fillings: dict[str, Pieces] = {}
        choice = ChatChoice(
            index=part.index,
            message=self._message(part),
            logprobs=self._explain(part, fillings),
            finish_reason=self._finish_reason(part) or "",
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if self._show_ids else UNSET,
        )
        return filled(choice, fillings)

    def _opening_event(self, part: Part) -> Pieces:
        chunk = self._chunk(ChatChunkChoice(index=part.index, delta=ChatDelta(role="assistant", content=self._empty)))
        fillings: dict[str, Pieces] = {}
        if self._show_ids:
            chunk.prompt_token_ids = list(self._prompt)
        chunk.prompt_logprobs = self._explain_prompt(part, fillings)
        return framed(filled(chunk, fillings))

    def _event(self, part: Part) -> Pieces:
        fillings: dict[str, Pieces] = {}
        choice = ChatChunkChoice(
            index=part.index,
            delta=self._delta(part),
            logprobs=self._explain(part, fillings),
        )
        if self._show_ids:
            choice.token_ids = part.token_ids
        if part.finish is not None:
            choice.finish_reason = self._finish_reason(part)
            choice.stop_reason = part.stop_reason
        return framed(filled(self._chunk(choice), fillings))

    def _around(self, delta: ChatDelta, choices: int) -> list[list[bytes]]:
        return [around(self._chunk(ChatChunkChoice(index=index, delta=delta))) for index in range(choices)]

    def _thought_alone(self, part: Part) -> str:
        """Return the thought of a part that shows nothing else."""
        aside = part.aside
        return aside.thought if aside is not None and self._show_thoughts and not (part.text or aside.calls) else ""

    def _note(self, part: Part) -> None:
        """Remember what the end of the answer tells of it."""
        if part.aside is not None:
            self._thought_tokens += part.aside.thought_tokens
            if part.aside.calls:
                self._calling.add(part.index)

    def _shows(self, part: Part) -> bool:
        aside = part.aside
        thought = aside is not None and aside.thought and self._show_thoughts
        return bool(part.finish or part.text or thought or (aside is not None and aside.calls))

    def _finish_reason(self, part: Part) -> str | None:
        """A call that was cut off by length was cut off: only one that the model ended is for the client to answer."""
        if part.finish is FinishReason.STOP and part.index in self._calling:
            return "tool_calls"
        return part.finish.value if part.finish is not None else None

    def _message(self, part: Part) -> ReplyMessage:
        message = ReplyMessage(content=part.text or self._empty)
        if part.aside is not None:
            if part.aside.thought and self._show_thoughts:
                message.reasoning_content = message.reasoning = part.aside.thought
            if part.aside.calls:
                message.tool_calls = [
                    ReplyCall(id=call.id or "", function=ReplyFunction(name=call.name or "", arguments=call.arguments))
                    for call in part.aside.calls
                ]
        return message

    def _delta(self, part: Part) -> ChatDelta:
        delta = ChatDelta(content=part.text or UNSET)
        if part.aside is not None:
            if part.aside.thought and self._show_thoughts:
                delta.reasoning_content = delta.reasoning = part.aside.thought
            if part.aside.calls:
                delta.tool_calls = [_call_delta(call) for call in part.aside.calls]
        return delta

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        cost: Usage | UnsetType | None = UNSET
        if self._running_usage:
            cost = usage(self._ticket, self._thought_tokens)
        elif self._include_usage:
            cost = None
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[] if choice is None else [choice],
            usage=cost,
        )

    def _explain_prompt(self, part: Part, fillings: dict[str, Pieces]) -> PromptLogprobs | UnsetType:
        """Tell it once, with the first choice."""
        if part.opening is None or part.index:
            return UNSET
        fillings["prompt_logprobs"] = explain_prompt(part.opening, self._most, self._tokenizer)
        return cast("PromptLogprobs", hole("prompt_logprobs"))

    def _explain(self, part: Part, fillings: dict[str, Pieces]) -> ChatLogprobs | None:
        """Return how likely the tokens of a part were, in `fillings` where they are many."""
        if not self._logprobs:
            return None
        tokens = map(self._likely, part.token_ids, part.logprobs)
        if len(part.token_ids) <= PIECE_TOKENS:
            return ChatLogprobs(content=list(tokens))
        fillings["content"] = array(elements(batched(tokens, PIECE_TOKENS)))
        return ChatLogprobs(content=hole("content"))

    def _likely(self, token_id: int, logprobs: TokenLogprobs) -> ChatLogprob:
        piece = self._tokenizer.piece
        chosen = piece(token_id)
        likely = [
            TopLogprob(token=readable(text), logprob=finite(logprob), bytes=list(text))
            for text, logprob in zip(map(piece, logprobs.top_ids), logprobs.top, strict=True)
        ]
        return ChatLogprob(
            token=readable(chosen), logprob=finite(logprobs.chosen), bytes=list(chosen), top_logprobs=likely
        )


def _call_delta(call: CallDelta) -> ReplyCallDelta:
    delta = ReplyCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
    if call.id is not None:
        delta.id, delta.type = call.id, "function"
    if call.name is not None:
        delta.function.name = call.name
    return delta
