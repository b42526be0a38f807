"""An answer as text_completion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Struct

from infd.http.formats.base import PIECE_TOKENS, PLACE, around, explain_prompt, finite, framed, readable, usage
from infd.http.formats.timings import timings
from infd.http.pieces import Pieces, add, array, batched, filled, hole
from infd.http.schema.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from infd.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from msgspec import UnsetType

    from infd.engine.admission.ticket import Ticket
    from infd.http.answer import Opening, Part
    from infd.http.schema.completions import CompletionRequest
    from infd.http.schema.usage import Usage
    from infd.request import TokenLogprobs
    from infd.text.tokenizer import Tokenizer

    Token = tuple[int, TokenLogprobs | None]


class Told(Struct):
    """What the choices of a prompt tell of it, encoded once.

    left             choices that have not told it yet
    prompt_logprobs  as a field of a choice
    logprobs         elements of the lists of CompletionLogprobs, by field, where the prompt is echoed
    characters       of its tokens, one after the other
    """

    left: int
    prompt_logprobs: Pieces = []
    logprobs: dict[str, Pieces] = {}
    characters: int = 0


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
        self._told: dict[int, Told] = {}  # by prompt
        self._offsets = [0] * choices  # characters already explained
        self._frames = [around(self._chunk([CompletionChoice(index=i, text=PLACE)])) for i in range(choices)]

    def events(self, part: Part) -> Pieces:
        if part.finish is None and self._only_text and part.opening is None:
            return [msgspec.json.encode(part.text).join(self._frames[part.index])] if part.text else []
        choice, fillings = self._choice(part)
        return framed(filled(self._chunk([choice]), fillings))

    def closing_events(self) -> bytes:
        if not self._include_usage:
            return b""
        chunk = self._chunk([])
        chunk.usage = usage(self._ticket)
        chunk.timings = timings(self._ticket)
        return event(msgspec.json.encode(chunk))

    def whole(self, parts: list[Part]) -> Pieces:
        response = self._chunk(hole("choices"))
        response.usage = usage(self._ticket)
        response.timings = timings(self._ticket)
        return filled(response, {"choices": array(*(filled(*self._choice(part)) for part in parts))})

    def _choice(self, part: Part) -> tuple[CompletionChoice, dict[str, Pieces]]:
        """Return a choice, and what belongs into its holes."""
        opening, fillings = part.opening, dict[str, Pieces]()
        told = None if opening is None else self._tell(part.index // self._per_prompt, opening)
        choice = CompletionChoice(index=part.index, text=part.text)
        token_ids = part.token_ids
        if opening is not None and opening.echo is not None:
            choice.text = opening.echo + choice.text
            token_ids = [*opening.token_ids, *token_ids]
        if self._logprobs is not None:
            choice.logprobs = self._explain(part, told, fillings)
        if self._show_ids:
            choice.token_ids = token_ids
            if part.index not in self._begun:
                self._begun.add(part.index)
                choice.prompt_token_ids = list(self._prompts[part.index // self._per_prompt])
        if told is not None and self._prompt_logprobs is not None:
            choice.prompt_logprobs = hole("prompt_logprobs")
            fillings["prompt_logprobs"] = told.prompt_logprobs
        if part.finish is not None:
            choice.finish_reason = part.finish.value
            choice.stop_reason = part.stop_reason
        return choice, fillings

    def _tell(self, prompt: int, opening: Opening) -> Told:
        """Return what a choice tells of its prompt: encoded for the first one, forgotten with the last one."""
        told = self._told.pop(prompt, None)
        if told is None:
            told = Told(self._per_prompt)
            if self._prompt_logprobs is not None:
                told.prompt_logprobs = explain_prompt(opening, self._prompt_logprobs, self._tokenizer)
            if self._logprobs is not None and opening.echo is not None:
                tokens = zip(opening.token_ids, opening.logprobs, strict=True)
                told.logprobs, told.characters = self._lists(tokens, 0)
        told.left -= 1
        if told.left:
            self._told[prompt] = told
        return told

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionResponse:
        cost: Usage | UnsetType | None = UNSET
        if self._running_usage:
            cost = usage(self._ticket)
        elif self._include_usage:
            cost = None
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=cost)

    def _explain(self, part: Part, told: Told | None, fillings: dict[str, Pieces]) -> CompletionLogprobs:
        """Return how likely the tokens of a part were, in `fillings` where they are many or its prompt's are, too."""
        tokens = zip(part.token_ids, part.logprobs, strict=True)
        offset = self._offsets[part.index] if told is None else told.characters
        echoed = {} if told is None else told.logprobs
        if not echoed and len(part.token_ids) <= PIECE_TOKENS:
            likely, self._offsets[part.index] = self._likely(tokens, offset)
            return likely
        lists, self._offsets[part.index] = self._lists(tokens, offset)
        for name, generated in lists.items():
            fillings[name] = array(echoed.get(name, []), generated)
        return CompletionLogprobs(
            text_offset=hole("text_offset"),
            token_logprobs=hole("token_logprobs"),
            tokens=hole("tokens"),
            top_logprobs=hole("top_logprobs") if self._logprobs else None,
        )

    def _lists(self, tokens: Iterable[Token], offset: int) -> tuple[dict[str, Pieces], int]:
        """Return the elements of the lists of CompletionLogprobs, and the offset after them."""
        lists: dict[str, Pieces] = {name: [] for name in CompletionLogprobs.__struct_fields__}
        for block in batched(tokens, PIECE_TOKENS):
            likely, offset = self._likely(block, offset)
            for name, pieces in lists.items():
                if (values := getattr(likely, name)) is not None:
                    add(pieces, values)
        return lists, offset

    def _likely(self, tokens: Iterable[Token], offset: int) -> tuple[CompletionLogprobs, int]:
        """Return how likely tokens were, and the offset after them."""
        names, offsets = [], []
        chosen: list[float | None] = []
        likely: list[dict[str, float] | None] = []
        for token_id, logprobs in tokens:
            token = readable(self._tokenizer.piece(token_id))
            names.append(token)
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
        lists = CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=chosen,
            tokens=names,
            top_logprobs=likely if self._logprobs else None,
        )
        return lists, offset
