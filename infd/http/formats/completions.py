"""An answer as text_completion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from infd.http.formats.base import PLACE, around, explain_prompt, finite, readable, usage
from infd.http.formats.timings import timings
from infd.http.schema.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from infd.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import UnsetType

    from infd.engine.ticket import Ticket
    from infd.http.answer import Part
    from infd.http.schema.completions import CompletionRequest
    from infd.http.schema.usage import Usage
    from infd.text.tokenizer import Tokenizer


class CompletionFormat:
    """The words of POST /v1/completions. Choices count answer after answer, prompt after prompt."""

    def __init__(
        self,
        request: CompletionRequest,
        ticket: Ticket,
        *,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._logprobs = request.logprobs
        self._prompt_logprobs = request.prompt_logprobs
        self._show_ids = bool(request.return_token_ids)
        self._ticket = ticket
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._per_prompt = request.n or 1
        self._id = f"cmpl-{ticket.id}"
        self._created = int(time.time())
        self._model = model
        self._only_text = self._logprobs is None and not (self._show_ids or self._running_usage)
        choices = self._per_prompt * len(prompts)
        self._begun: set[int] = set()
        self._offsets = [0] * choices  # characters already explained
        self._frames = [around(self._chunk([CompletionChoice(index=i, text=PLACE)])) for i in range(choices)]

    def events(self, parts: list[Part]) -> bytes:
        pieces: list[bytes] = []
        for part in parts:
            if part.finish is None and self._only_text and part.prompt_logprobs is None:
                if part.text:
                    before, after = self._frames[part.index]
                    pieces += before, msgspec.json.encode(part.text), after
            else:
                pieces.append(event(msgspec.json.encode(self._chunk([self._choice(part)]))))
        return b"".join(pieces)

    def closing_events(self) -> bytes:
        if not self._include_usage:
            return b""
        chunk = self._chunk([])
        chunk.usage = usage(self._ticket)
        chunk.timings = timings(self._ticket)
        return event(msgspec.json.encode(chunk))

    def whole(self, parts: list[Part]) -> bytes:
        response = self._chunk([self._choice(part) for part in parts])
        response.usage = usage(self._ticket)
        response.timings = timings(self._ticket)
        return msgspec.json.encode(response)

    def _choice(self, part: Part) -> CompletionChoice:
        choice = CompletionChoice(index=part.index, text=part.text, logprobs=self._explain(part))
        if self._show_ids:
            choice.token_ids = part.token_ids
            if part.index not in self._begun:
                self._begun.add(part.index)
                choice.prompt_token_ids = list(self._prompt(part))
        if part.prompt_logprobs is not None and self._prompt_logprobs is not None:
            choice.prompt_logprobs = explain_prompt(
                self._prompt(part), part.prompt_logprobs, self._prompt_logprobs, self._tokenizer
            )
        if part.finish is not None:
            choice.finish_reason = part.finish.value
            choice.stop_reason = part.stop_reason
        return choice

    def _prompt(self, part: Part) -> tuple[int, ...]:
        return self._prompts[part.index // self._per_prompt]

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionResponse:
        cost: Usage | UnsetType | None = UNSET
        if self._running_usage:
            cost = usage(self._ticket)
        elif self._include_usage:
            cost = None
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=cost)

    def _explain(self, part: Part) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        tokens, offsets = [], []
        chosen: list[float | None] = []
        likely: list[dict[str, float] | None] = []
        offset = self._offsets[part.index]
        for token_id, logprobs in zip(part.token_ids, part.logprobs, strict=True):
            token = readable(self._tokenizer.piece(token_id))
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
            if logprobs is None:
                chosen.append(None)
                likely.append(None)
                continue
            chosen.append(finite(logprobs.chosen))
            top: dict[str, float] = {}
            for top_id, logprob in zip(logprobs.top_ids[: self._logprobs], logprobs.top, strict=False):
                # Different halves of characters read alike; the likelier one keeps the name.
                top.setdefault(readable(self._tokenizer.piece(top_id)), finite(logprob))
            top.setdefault(token, finite(logprobs.chosen))
            likely.append(top)
        self._offsets[part.index] = offset
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=chosen,
            tokens=tokens,
            top_logprobs=likely if self._logprobs else None,
        )
