"""Collect the deltas of an answer that is not streamed.

Log-probabilities are encoded in blocks as they arrive, because as objects they take several times the memory of their
JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.http.answer import ChoiceDelta
from infd.http.pieces import PIECE_TOKENS, extend
from infd.text.markup import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.errors import RequestError
    from infd.http.answer import PromptReport
    from infd.http.pieces import Pieces
    from infd.request import FinishReason, RoutedExperts, TokenLogprobs
    from infd.text.markup import Aside


# Experts of so many bytes take about as long to encode as the log-probabilities of a token.
ROUTED_BYTES: Final = 2**15


class WholeChoice(Struct):
    """One complete choice.

    delta             all deltas of the choice merged into one delta, without log-probabilities
    encoded_logprobs  the choice's log-probabilities, encoded by `Format.encode_logprobs`
    """

    delta: ChoiceDelta
    encoded_logprobs: dict[str, Pieces]


class Gathering:
    """The collected choices of one answer.

    encode_logprobs  encodes the log-probabilities of a delta and of its prompt report
    """

    def __init__(self, choices: int, encode_logprobs: Callable[[ChoiceDelta], dict[str, Pieces]]) -> None:
        self._choices = [_Choice(index) for index in range(choices)]
        self._encode_logprobs = encode_logprobs

    def tokens_to_encode(self, deltas: Sequence[ChoiceDelta]) -> int:
        """Return the number of tokens whose log-probabilities `add` would encode for these deltas."""
        count = 0
        for delta in deltas:
            if delta.prompt is not None:
                count += len(delta.prompt.scores)
            waiting = len(self._choices[delta.index].token_ids_waiting) + len(delta.logprobs)
            count += waiting if waiting >= PIECE_TOKENS or delta.prompt is not None else 0
        return count

    @property
    def unencoded_tokens(self) -> int:
        """The number of tokens whose log-probabilities `finish` would encode; experts count too, by ROUTED_BYTES."""
        return sum(len(choice.token_ids_waiting) + choice.routed_bytes // ROUTED_BYTES for choice in self._choices)

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.index]
            choice.add(delta)
            if delta.prompt is not None or len(choice.token_ids_waiting) >= PIECE_TOKENS:
                choice.encode_logprobs(self._encode_logprobs)

    def finish(self, generated: int, returned: int) -> list[WholeChoice]:
        """Return the complete choices, numbered from 0, prompt by prompt.

        If fewer choices are returned than were generated for each prompt, these are the likeliest, likeliest first.
        """
        choices = self._choices
        if returned < generated:
            prompts = [choices[first : first + generated] for first in range(0, len(choices), generated)]
            choices = [
                choice
                for of_prompt in prompts
                for choice in sorted(of_prompt, key=_Choice.sort_key, reverse=True)[:returned]
            ]
        for choice in choices:
            choice.encode_logprobs(self._encode_logprobs)  # a choice without tokens gets empty arrays
        return [choice.whole(index) for index, choice in enumerate(choices)]


class _Choice:
    """One choice that is still being generated: the deltas received so far."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._asides: list[Aside | None] = []
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._end_id: int | None = None
        self._error: RequestError | None = None
        self._prompt: PromptReport | None = None
        self._routed: RoutedExperts | None = None
        self._encoded_logprobs: dict[str, Pieces] = {}
        self._logprobs_sum = 0.0
        self._logprobs_count = 0
        self._prompt_waiting: PromptReport | None = None
        self.token_ids_waiting: list[int] = []  # tokens whose log-probabilities are not encoded yet
        self._logprobs_waiting: list[TokenLogprobs] = []

    def add(self, delta: ChoiceDelta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._asides.append(delta.aside)
        self._finish, self._error = delta.finish, delta.error
        self._stop_reason, self._end_id, self._routed = delta.stop_reason, delta.end_id, delta.routed
        if delta.prompt is not None:
            self._prompt = self._prompt_waiting = delta.prompt
        if delta.logprobs:
            self.token_ids_waiting += delta.token_ids
            self._logprobs_waiting += delta.logprobs
            for token in delta.logprobs:
                self._logprobs_sum += token.chosen
            self._logprobs_count += len(delta.logprobs)

    @property
    def routed_bytes(self) -> int:
        return 0 if self._routed is None else len(self._routed.values)

    def encode_logprobs(self, encode_logprobs: Callable[[ChoiceDelta], dict[str, Pieces]]) -> None:
        waiting = ChoiceDelta(self._index, "", self.token_ids_waiting, self._logprobs_waiting)
        waiting.prompt, self._prompt_waiting = self._prompt_waiting, None
        for name, pieces in encode_logprobs(waiting).items():
            extend(self._encoded_logprobs.setdefault(name, []), pieces)
        self.token_ids_waiting, self._logprobs_waiting = [], []

    def sort_key(self) -> tuple[bool, float]:
        """Return whether the choice has not failed, and the mean log-probability of its generated tokens."""
        mean = self._logprobs_sum / self._logprobs_count if self._logprobs_count else 0.0
        return self._error is None, mean

    def whole(self, index: int) -> WholeChoice:
        delta = ChoiceDelta(
            index,
            "".join(self._texts),
            self._token_ids,
            (),
            self._finish,
            self._stop_reason,
            self._prompt,
            joined(self._asides, self._texts),
            self._error,
            self._end_id,
            self._routed,
        )
        return WholeChoice(delta, self._encoded_logprobs)
