"""Encode an answer of llama.cpp's POST /infill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from infd.http.formats.base import event
from infd.http.formats.openai import OpenAIErrors
from infd.http.formats.timings import timings
from infd.http.schema.infill import InfillAnswer, InfillChunk
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.errors import RequestError
    from infd.http.answer import ChoiceDelta
    from infd.http.formats.base import Accepted
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.http.schema.infill import InfillRequest


class InfillFormat(OpenAIErrors):
    """The format of POST /infill. Its streams have no end marker: the last event has `stop`."""

    folds = False

    def __init__(self, request: InfillRequest, accepted: Accepted) -> None:
        self._ticket = accepted.ticket
        self._model = accepted.model
        self._last: ChoiceDelta | None = None

    def error_events(self, error: RequestError) -> bytes:
        return event(self.error_body(error))

    def events(self, delta: ChoiceDelta) -> Pieces:
        if delta.finish is not None:
            self._last = delta
        if not delta.text and not delta.token_ids:
            return []
        chunk = InfillChunk(
            content=delta.text,
            tokens=delta.token_ids,
            tokens_predicted=self._ticket.generated_tokens,
            tokens_evaluated=self._ticket.prompt_tokens,
        )
        return [event(msgspec.json.encode(chunk))]

    def last_events(self) -> bytes:
        assert self._last is not None
        return event(msgspec.json.encode(self._answer(self._last, "", [])))

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        return {}

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        (choice,) = choices
        delta = choice.delta
        return [msgspec.json.encode(self._answer(delta, delta.text, delta.token_ids))]

    def _answer(self, delta: ChoiceDelta, text: str, token_ids: list[int]) -> InfillAnswer:
        ticket, word = self._ticket, delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        answer = InfillAnswer(
            content=text,
            tokens=token_ids,
            model=self._model,
            tokens_predicted=ticket.generated_tokens,
            tokens_evaluated=ticket.prompt_tokens,
            tokens_cached=ticket.cached_tokens,
            stop_type="none",
            stopping_word=word,
            timings=timings(ticket),
        )
        if delta.finish is FinishReason.LENGTH:
            answer.stop_type = "limit"
        elif delta.finish is FinishReason.STOP:
            answer.stop_type = "word" if word else "eos"
        return answer
