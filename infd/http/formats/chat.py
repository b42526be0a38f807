"""Encode an answer as chat.completion or chat.completion.chunk objects."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import UNSET

from infd.http.conversation import final_text
from infd.http.formats.base import (
    TEXT_PLACEHOLDER,
    encode_prompt_logprobs,
    event,
    framed,
    name_by_id,
    name_by_text,
    split_chunk,
    token_logprobs,
    usage,
)
from infd.http.formats.inputs import InputText, input_of
from infd.http.formats.openai import DONE, OpenAIErrors, detail
from infd.http.formats.timings import timings
from infd.http.pieces import PIECE_TOKENS, array, arrays, batched, elements, placeholder, substitute
from infd.http.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    ReplyMessage,
)
from infd.http.schema.routing import routed_experts
from infd.http.schema.tools import (
    CustomDelta,
    CustomTool,
    FunctionDelta,
    ReplyCall,
    ReplyCallDelta,
    ReplyCustom,
    ReplyFunction,
)
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from msgspec import UnsetType

    from infd.http.answer import ChoiceDelta
    from infd.http.formats.base import Accepted
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.http.schema.chat import ChatRequest
    from infd.http.schema.logprobs import PromptLogprobs
    from infd.http.schema.usage import Usage
    from infd.text.markup import CallDelta


class ChatFormat(OpenAIErrors):
    """The format of POST /v1/chat/completions."""

    folds = False

    def __init__(self, request: ChatRequest, accepted: Accepted) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._logprobs = bool(request.logprobs)
        self._prompt_logprobs = request.prompt_logprobs or 0
        self._show_ids = bool(request.return_token_ids)
        self._ticket = accepted.ticket
        self._tokenizer = accepted.tokenizer
        self._name = name_by_id if request.return_tokens_as_token_ids else name_by_text
        (self._prompt,) = accepted.prompts
        self._id = f"chatcmpl-{accepted.ticket.id}"
        self._created = int(time.time())
        self._model = accepted.model
        self._fingerprint = accepted.fingerprint
        self._only_text = not (self._logprobs or self._show_ids or self._running_usage)
        last = request.messages[-1]
        self._echo = final_text(request.messages) if request.echo and last.role == "assistant" else ""
        self._empty_content = None if accepted.marked_up else ""  # content of a message without text
        self._prediction = None if request.prediction is None else request.prediction.text
        self._show_thoughts = request.include_reasoning is not False
        self._thought_tokens = 0
        self._choices_with_calls: set[int] = set()
        self._custom = {tool.custom.name for tool in request.tools or () if isinstance(tool, CustomTool)}
        self._inputs: dict[tuple[int, int], InputText] = {}  # (choice, call) -> input of a custom tool's open call
        self._function_call = request.functions is not None  # answers have function_call in place of tool_calls
        self._begun: set[int] = set()
        self._frames = self._split_chunks(ChatDelta(content=TEXT_PLACEHOLDER), request.n or 1)
        self._thought_frames = (
            self._split_chunks(
                ChatDelta(reasoning_content=TEXT_PLACEHOLDER, reasoning=TEXT_PLACEHOLDER), request.n or 1
            )
            if accepted.marked_up
            else []
        )

    def events(self, delta: ChoiceDelta) -> Pieces:
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            echo = [self._echo_event(delta.index)] if self._echo else []
            return self._opening_event(delta) + echo + self.events(delta)
        if delta.finish is None and delta.aside is None and self._only_text:
            return [msgspec.json.encode(delta.text).join(self._frames[delta.index])] if delta.text else []
        self._record_markup(delta)
        if delta.finish is None and self._only_text and (thought := self._only_thought(delta)):
            return [msgspec.json.encode(thought).join(self._thought_frames[delta.index])]
        return self._event(delta) if self._is_visible(delta) or not self._only_text else []

    def last_events(self) -> bytes:
        if not self._include_usage:
            return DONE
        chunk = self._chunk(None)
        chunk.usage = self._usage()
        chunk.timings = timings(self._ticket)
        return event(msgspec.json.encode(chunk)) + DONE

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        return self._encode_prompt_logprobs(delta) | self._encode_token_logprobs(delta)

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        for choice in choices:
            self._record_markup(choice.delta)
        encoded = choices[0].encoded_logprobs
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=placeholder("choices"),
            usage=self._usage(),
            timings=timings(self._ticket),
            prompt_token_ids=list(self._prompt) if self._show_ids else UNSET,
            prompt_logprobs=_prompt_logprobs(encoded),
        )
        return substitute(response, arrays(encoded) | {"choices": array(*map(self._choice, choices))})

    def _choice(self, whole: WholeChoice) -> Pieces:
        delta = whole.delta
        choice = ChatChoice(
            index=delta.index,
            message=self._message(delta),
            logprobs=self._logprobs_placeholder(),
            finish_reason=self._finish_reason(delta) or "",
            stop_reason=delta.stop_reason,
            matched_stop=delta.matched,
            token_ids=delta.token_ids if self._show_ids else UNSET,
            error=UNSET if delta.error is None else detail(delta.error),
            routed_experts=routed_experts(delta.routed),
        )
        return substitute(choice, arrays(whole.encoded_logprobs))

    def _opening_event(self, delta: ChoiceDelta) -> Pieces:
        opening = ChatDelta(role="assistant", content=self._empty_content, refusal=None)
        chunk = self._chunk(ChatChunkChoice(index=delta.index, delta=opening), unsent=len(delta.token_ids))
        encoded = self._encode_prompt_logprobs(delta)
        if self._show_ids:
            chunk.prompt_token_ids = list(self._prompt)
        chunk.prompt_logprobs = _prompt_logprobs(encoded)
        return framed(substitute(chunk, arrays(encoded)))

    def _echo_event(self, index: int) -> bytes:
        return event(
            msgspec.json.encode(self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=self._echo))))
        )

    def _event(self, delta: ChoiceDelta) -> Pieces:
        encoded: dict[str, Pieces] = {}
        choice = ChatChunkChoice(index=delta.index, delta=self._delta(delta))
        if self._logprobs and len(delta.token_ids) <= PIECE_TOKENS:
            # Encoding a few tokens with the chunk is faster than encoding a separate list.
            choice.logprobs = ChatLogprobs(content=list(token_logprobs(delta, self._tokenizer, self._name)))
        else:
            encoded, choice.logprobs = self._encode_token_logprobs(delta), self._logprobs_placeholder()
        if self._show_ids:
            choice.token_ids = delta.token_ids
        if delta.finish is not None:
            choice.finish_reason = self._finish_reason(delta)
            choice.stop_reason, choice.matched_stop = delta.stop_reason, delta.matched
            choice.error = UNSET if delta.error is None else detail(delta.error)
            choice.routed_experts = routed_experts(delta.routed)
        return framed(substitute(self._chunk(choice), arrays(encoded)))

    def _split_chunks(self, delta: ChatDelta, choices: int) -> list[list[bytes]]:
        return [split_chunk(self._chunk(ChatChunkChoice(index=index, delta=delta))) for index in range(choices)]

    def _only_thought(self, delta: ChoiceDelta) -> str:
        """Return the thought of a delta if it is the only visible part, else an empty string."""
        aside = delta.aside
        return aside.thought if aside is not None and self._show_thoughts and not (delta.text or aside.calls) else ""

    def _record_markup(self, delta: ChoiceDelta) -> None:
        """Count thought tokens and record choices with tool calls; the end of the answer reports both."""
        if delta.aside is not None:
            self._thought_tokens += delta.aside.thought_tokens
            if delta.aside.calls:
                self._choices_with_calls.add(delta.index)

    def _is_visible(self, delta: ChoiceDelta) -> bool:
        aside = delta.aside
        thought = aside is not None and aside.thought and self._show_thoughts
        return bool(delta.finish or delta.text or thought or (aside is not None and aside.calls))

    def _finish_reason(self, delta: ChoiceDelta) -> str | None:
        """Return finish_reason. It names calls only if the model ended its turn: clients run no truncated calls."""
        if delta.finish is FinishReason.STOP and delta.index in self._choices_with_calls:
            return "function_call" if self._function_call else "tool_calls"
        return delta.finish.value if delta.finish is not None else None

    def _message(self, delta: ChoiceDelta) -> ReplyMessage:
        message = ReplyMessage(content=self._echo + delta.text or self._empty_content)
        if delta.aside is not None:
            if delta.aside.thought and self._show_thoughts:
                message.reasoning_content = message.reasoning = delta.aside.thought
            calls = delta.aside.calls
            if calls and self._function_call:
                message.function_call = ReplyFunction(name=calls[0].name or "", arguments=calls[0].arguments)
            elif calls:
                message.tool_calls = [self._call(call) for call in calls]
        return message

    def _delta(self, delta: ChoiceDelta) -> ChatDelta:
        chat_delta = ChatDelta(content=delta.text or UNSET)
        if delta.aside is not None:
            if delta.aside.thought and self._show_thoughts:
                chat_delta.reasoning_content = chat_delta.reasoning = delta.aside.thought
            calls = delta.aside.calls
            if calls and self._function_call:
                chat_delta.function_call = _function_delta(calls[0])
            elif calls:
                chat_delta.tool_calls = [self._call_delta(delta.index, call) for call in calls]
        if delta.finish is not None and self._inputs and (rest := list(self._input_ends(delta.index))):
            chat_delta.tool_calls = (chat_delta.tool_calls or []) + rest
        return chat_delta

    def _call(self, call: CallDelta) -> ReplyCall:
        name = call.name or ""
        if name in self._custom:
            custom = ReplyCustom(name=name, input=input_of(call.arguments))
            return ReplyCall(id=call.id or "", type="custom", custom=custom)
        return ReplyCall(id=call.id or "", function=ReplyFunction(name=name, arguments=call.arguments))

    def _call_delta(self, choice: int, call: CallDelta) -> ReplyCallDelta:
        key = choice, call.index
        if call.name in self._custom:
            self._inputs[key] = InputText()
        delta = ReplyCallDelta(index=call.index)
        if key in self._inputs:
            delta.custom = CustomDelta(input=self._inputs[key].feed(call.arguments))
            if call.name is not None:
                delta.custom.name = call.name
        else:
            delta.function = _function_delta(call)
        if call.id is not None:
            delta.id, delta.type = call.id, "custom" if key in self._inputs else "function"
        return delta

    def _input_ends(self, choice: int) -> Iterator[ReplyCallDelta]:
        """Yield the ends of a choice's inputs that are known only once the calls have ended."""
        for key in [key for key in self._inputs if key[0] == choice]:
            if rest := self._inputs.pop(key).finish():
                yield ReplyCallDelta(index=key[1], custom=CustomDelta(input=rest))

    def _usage(self, unsent: int = 0) -> Usage:
        return usage(self._ticket, self._thought_tokens, unsent, prediction=self._prediction)

    def _chunk(self, choice: ChatChunkChoice | None, unsent: int = 0) -> ChatChunk:
        chunk_usage: Usage | UnsetType | None = UNSET
        if self._running_usage:
            chunk_usage = self._usage(unsent)
        elif self._include_usage:
            chunk_usage = None
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=[] if choice is None else [choice],
            usage=chunk_usage,
        )

    def _encode_prompt_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        """Return the encoded elements of prompt_logprobs, which only the first choice reports."""
        if delta.prompt is None or delta.index:
            return {}
        return {"prompt_logprobs": encode_prompt_logprobs(delta.prompt, self._prompt_logprobs, self._tokenizer)}

    def _encode_token_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        """Return the encoded elements of ChatLogprobs.content."""
        if not self._logprobs:
            return {}
        tokens = token_logprobs(delta, self._tokenizer, self._name)
        return {"content": elements(batched(tokens, PIECE_TOKENS))}

    def _logprobs_placeholder(self) -> ChatLogprobs | None:
        return ChatLogprobs(content=placeholder("content")) if self._logprobs else None


def _prompt_logprobs(encoded: Mapping[str, Pieces]) -> PromptLogprobs | UnsetType:
    return cast("PromptLogprobs", placeholder("prompt_logprobs")) if "prompt_logprobs" in encoded else UNSET


def _function_delta(call: CallDelta) -> FunctionDelta:
    delta = FunctionDelta(arguments=call.arguments)
    if call.name is not None:
        delta.name = call.name
    return delta
