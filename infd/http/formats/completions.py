"""Encode an answer as text_completion objects."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Struct

from infd.http.formats.base import (
    TEXT_PLACEHOLDER,
    encode_prompt_logprobs,
    event,
    finite,
    framed,
    name_by_id,
    name_by_text,
    readable,
    split_chunk,
    usage,
)
from infd.http.formats.openai import DONE, OpenAIErrors, detail
from infd.http.formats.timings import timings
from infd.http.pieces import PIECE_TOKENS, Pieces, add, array, arrays, batched, extend, placeholder, substitute
from infd.http.schema.completions import CompletionChoice, CompletionLogprobs, CompletionResponse
from infd.http.schema.routing import routed_experts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from msgspec import UnsetType

    from infd.http.answer import ChoiceDelta, PromptReport
    from infd.http.formats.base import Accepted
    from infd.http.gathering import WholeChoice
    from infd.http.schema.completions import CompletionRequest
    from infd.http.schema.usage import Usage
    from infd.request import TokenLogprobs

    Token = tuple[int, TokenLogprobs | None]


class EncodedReport(Struct):
    """A PromptReport, encoded once for all choices of the prompt.

    remaining   number of choices that have not repeated the report yet
    elements    encoded elements of JSON arrays, by name
    characters  total length of the prompt tokens' texts
    """

    remaining: int
    elements: dict[str, Pieces]
    characters: int = 0


class CompletionFormat(OpenAIErrors):
    """The format of POST /v1/completions. Choices are numbered prompt by prompt."""

    folds = False

    def __init__(self, request: CompletionRequest, accepted: Accepted) -> None:
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._logprobs = request.logprobs
        listed = set(request.logprob_token_ids or ())
        # Number of alternatives of each generated token; None: all that there are.
        self._alternatives = len(listed) or (None if request.logprobs == -1 else request.logprobs)
        self._prompt_logprobs = request.prompt_logprobs
        self._show_ids = bool(request.return_token_ids)
        self._ticket = accepted.ticket
        self._tokenizer = accepted.tokenizer
        self._name = name_by_id if request.return_tokens_as_token_ids else name_by_text
        self._prompts = accepted.prompts
        self._returned = request.n or 1  # choices returned for each prompt
        self._generated = self._returned if request.use_beam_search else request.best_of or self._returned
        self._id = f"cmpl-{accepted.ticket.id}"
        self._created = int(time.time())
        self._model = accepted.model
        self._fingerprint = accepted.fingerprint
        self._only_text = self._logprobs is None and not (self._show_ids or self._running_usage)
        self._begun: set[int] = set()
        self._reports: dict[int, EncodedReport] = {}  # encoded reports by prompt
        self._offsets = [0] * (self._generated * len(self._prompts))  # text_offset of each choice's next token
        self._frames = [
            split_chunk(self._chunk([CompletionChoice(index=index, text=TEXT_PLACEHOLDER)]))
            for index in range(self._returned * len(self._prompts))
        ]

    def events(self, delta: ChoiceDelta) -> Pieces:
        if delta.finish is None and self._only_text and delta.prompt is None:
            return [msgspec.json.encode(delta.text).join(self._frames[delta.index])] if delta.text else []
        if self._logprobs is not None and delta.prompt is None and len(delta.token_ids) <= PIECE_TOKENS:
            # Encoding a few tokens with the chunk is faster than encoding separate lists.
            choice = self._choice(delta, {})
            tokens = zip(delta.token_ids, delta.logprobs, strict=True)
            choice.logprobs, self._offsets[delta.index] = self._logprob_lists(tokens, self._offsets[delta.index])
            return [event(msgspec.json.encode(self._chunk([choice])))]
        encoded = self.encode_logprobs(delta)
        return framed(substitute(self._chunk([self._choice(delta, encoded)]), arrays(encoded)))

    def last_events(self) -> bytes:
        if not self._include_usage:
            return DONE
        chunk = self._chunk([])
        chunk.usage = usage(self._ticket)
        chunk.timings = timings(self._ticket)
        return event(msgspec.json.encode(chunk)) + DONE

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        encoded: dict[str, Pieces] = {}
        if delta.prompt is not None:
            report = self._encoded_report(delta.index // self._generated, delta.prompt)
            encoded = {name: [*pieces] for name, pieces in report.elements.items()}
            self._offsets[delta.index] = report.characters
        if self._logprobs is not None:
            tokens = zip(delta.token_ids, delta.logprobs, strict=True)
            lists, self._offsets[delta.index] = self._encode_lists(tokens, self._offsets[delta.index])
            for name, pieces in lists.items():
                extend(encoded.setdefault(name, []), pieces)
        return encoded

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        response = self._chunk(placeholder("choices"))
        response.usage = usage(self._ticket)
        response.timings = timings(self._ticket)
        bodies = (
            substitute(self._choice(choice.delta, choice.encoded_logprobs), arrays(choice.encoded_logprobs))
            for choice in choices
        )
        return substitute(response, {"choices": array(*bodies)})

    def _choice(self, delta: ChoiceDelta, encoded: Mapping[str, Pieces]) -> CompletionChoice:
        """Return a choice with placeholders for the arrays in `encoded`."""
        choice = CompletionChoice(index=delta.index, text=delta.text)
        token_ids = delta.token_ids
        if delta.prompt is not None and delta.prompt.echo is not None:
            choice.text = delta.prompt.echo + choice.text
            token_ids = [*delta.prompt.token_ids, *token_ids]
        if self._logprobs is not None:
            choice.logprobs = CompletionLogprobs(
                text_offset=placeholder("text_offset"),
                token_logprobs=placeholder("token_logprobs"),
                tokens=placeholder("tokens"),
                top_logprobs=placeholder("top_logprobs"),
            )
        if self._show_ids:
            choice.token_ids = token_ids
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                choice.prompt_token_ids = list(self._prompts[delta.index // self._returned])
        if "prompt_logprobs" in encoded:
            choice.prompt_logprobs = placeholder("prompt_logprobs")
        if delta.finish is not None:
            choice.finish_reason = delta.finish.value
            choice.stop_reason, choice.matched_stop = delta.stop_reason, delta.matched
            choice.error = UNSET if delta.error is None else detail(delta.error)
            choice.routed_experts = routed_experts(delta.routed)
        return choice

    def _encoded_report(self, prompt: int, report: PromptReport) -> EncodedReport:
        """Return a prompt's report, encoded for the prompt's first choice, and dropped after its last choice."""
        encoded = self._reports.pop(prompt, None)
        if encoded is None:
            encoded = EncodedReport(self._generated, {})
            if self._logprobs is not None and report.echo is not None:
                tokens = zip(report.token_ids, report.logprobs, strict=True)
                encoded.elements, encoded.characters = self._encode_lists(tokens, 0)
            if self._prompt_logprobs is not None:
                encoded.elements["prompt_logprobs"] = encode_prompt_logprobs(
                    report, self._prompt_logprobs, self._tokenizer
                )
        encoded.remaining -= 1
        if encoded.remaining:
            self._reports[prompt] = encoded
        return encoded

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionResponse:
        chunk_usage: Usage | UnsetType | None = UNSET
        if self._running_usage:
            chunk_usage = usage(self._ticket)
        elif self._include_usage:
            chunk_usage = None
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=chunk_usage,
        )

    def _encode_lists(self, tokens: Iterable[Token], offset: int) -> tuple[dict[str, Pieces], int]:
        """Return the encoded elements of CompletionLogprobs' lists, and the text_offset of the next token."""
        lists: dict[str, Pieces] = {name: [] for name in CompletionLogprobs.__struct_fields__}
        for block in batched(tokens, PIECE_TOKENS):
            values, offset = self._logprob_lists(block, offset)
            for name, pieces in lists.items():
                add(pieces, getattr(values, name))
        return lists, offset

    def _logprob_lists(self, tokens: Iterable[Token], offset: int) -> tuple[CompletionLogprobs, int]:
        """Return the log-probabilities of tokens, and the text_offset of the next token."""
        names, offsets = [], []
        chosen: list[float | None] = []
        likely: list[dict[str, float] | None] = []
        for token_id, logprobs in tokens:
            piece = self._tokenizer.piece(token_id)
            token = self._name(token_id, piece)
            names.append(token)
            offsets.append(offset)
            offset += len(readable(piece))
            if logprobs is None:
                chosen.append(None)
                likely.append(None)
                continue
            chosen.append(finite(logprobs.chosen))
            top: dict[str, float] = {}
            for top_id, logprob in zip(logprobs.top_ids[: self._alternatives], logprobs.top, strict=False):
                # Parts of different characters all decode to U+FFFD; only the likeliest of these tokens gets an entry.
                top.setdefault(self._name(top_id, self._tokenizer.piece(top_id)), finite(logprob))
            top.setdefault(token, finite(logprobs.chosen))
            likely.append(top)
        lists = CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=chosen,
            tokens=names,
            top_logprobs=likely,
        )
        return lists, offset
