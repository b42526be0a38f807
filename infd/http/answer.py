"""The answer to one request as it grows: token ids become text, choice by choice.

Streamed or gathered, every answer is read through here.
"""

from __future__ import annotations

from itertools import chain, repeat
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import RequestFailed
from infd.request import FinishReason
from infd.text.markup import joined

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from infd.engine.streams.stream import Choices, Delta, Taker
    from infd.request import TokenLogprobs
    from infd.text.markup import Aside
    from infd.text.reply import Reply


class Part(Struct):
    """What is new in one choice.

    logprobs     one per token, where asked
    stop_reason  the stop string, or the id among those the request named, that finished it
    opening      in a choice's first part, where it is told of its prompt
    aside        thoughts and calls that were taken out of its text
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    opening: Opening | None = None
    aside: Aside | None = None


class Opening(Struct):
    """What the choices of one prompt tell about it, before anything is generated: one for all of them.

    echo    its text, to be repeated; None where not asked
    scored  whether its log-probabilities were asked for
    scores  these, once the first choice has brought them: one per token but the first; none if it was aborted before
    """

    token_ids: tuple[int, ...]
    echo: str | None
    scored: bool
    scores: Sequence[TokenLogprobs] = ()

    @property
    def logprobs(self) -> Iterator[TokenLogprobs | None]:
        """Yield one per token; None for the first, which nothing comes before, and where nothing is known."""
        return chain(repeat(None, len(self.token_ids) - len(self.scores)), self.scores)


class Answer:
    """Iterate to get all parts that have come since the last look; raises what ended a choice in an error.

    choices_each  choices made of each prompt
    answers_each  and of these returned
    openings      one per prompt, or none
    stop_ids      end ids that the request named itself
    show_stop_id  whether such an id's text belongs to the answer
    """

    def __init__(
        self,
        choices: Choices,
        replies: Sequence[Reply],
        *,
        choices_each: int,
        answers_each: int,
        openings: Sequence[Opening],
        stop_ids: Collection[int],
        show_stop_id: bool,
    ) -> None:
        self._choices = choices
        self._replies = replies
        self._choices_each = choices_each
        self._answers_each = answers_each
        self._openings = openings
        self._unopened = set(range(len(replies))) if openings else set()
        self._stop_ids = stop_ids
        self._show_stop_id = show_stop_id

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[Part]:
        choices = self._choices
        while not choices.ready:
            await choices.news()
        parts = [self._part(*choices.take())]
        while choices.ready:
            parts.append(self._part(*choices.take()))
        return parts

    @property
    def single(self) -> bool:
        """Whether it is one choice."""
        return len(self._replies) == 1

    def offered(self, taker: Taker) -> AbstractContextManager[None]:
        """Offer tokens to `taker` within this block, as `Choices.offered` does, but not a choice's first, with which it
        tells of its prompt.
        """

        def unless_unopened(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
            return index not in self._unopened and taker(index, token_ids, logprobs)

        return self._choices.offered(unless_unopened if self._unopened else taker)

    def part(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> Part:
        """Return what these tokens bring to a choice that goes on."""
        reply = self._replies[index]
        part = Part(index, reply.take(), token_ids, logprobs)
        if reply.reading is not None:
            part.aside = reply.reading.take()
        return part

    async def gather(self) -> list[Part]:
        """Return every choice whole, in order of index; where fewer are returned than made, the best of them."""
        pieces: list[list[Part]] = [[] for _ in self._replies]

        def keep(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
            pieces[index].append(self.part(index, token_ids, logprobs))
            return True

        with self.offered(keep):
            async for parts in self:
                for part in parts:
                    pieces[part.index].append(part)
        whole = [_joined(parts) for parts in pieces]
        return whole if self._answers_each == self._choices_each else self._best(whole)

    def _best(self, whole: list[Part]) -> list[Part]:
        """Return, of each prompt's choices, those whose generated tokens were likeliest, each on average."""
        best: list[Part] = []
        for first in range(0, len(whole), self._choices_each):
            rivals = whole[first : first + self._choices_each]
            rivals.sort(key=_mean_logprob, reverse=True)
            best += rivals[: self._answers_each]
        for index, part in enumerate(best):
            part.index = index
        return best

    def _part(self, index: int, delta: Delta) -> Part:
        part = self._generated(index, delta)
        if index in self._unopened:
            self._unopened.remove(index)
            self._open(part, delta.prompt_logprobs)
        return part

    def _open(self, part: Part, scores: Sequence[TokenLogprobs]) -> None:
        """Let a choice begin with its prompt, whose scores come to the first choice."""
        prompt, choice = divmod(part.index, self._choices_each)
        part.opening = self._openings[prompt]
        if not choice:
            part.opening.scores = scores
        else:
            assert prompt * self._choices_each not in self._unopened, "a choice has begun before the scores were known"

    def _generated(self, index: int, delta: Delta) -> Part:
        if delta.finish is None:
            return self.part(index, delta.token_ids, delta.logprobs)
        if delta.finish is FinishReason.ERROR:
            error = delta.error or RequestFailed("the engine gave no reason")
            raise error.with_traceback(None)  # many streams may end with one error: each shows its own way only
        stop_id = delta.stop_id if delta.stop_id in self._stop_ids else None
        reply = self._replies[index]
        if stop_id is not None and self._show_stop_id:
            reply.feed([stop_id])
        part = Part(index, reply.finish(), delta.token_ids, delta.logprobs, delta.finish, stop_id)
        if reply.stop_reason is not None:  # the last bytes may complete a stop string after the engine ended it
            part.finish, part.stop_reason = FinishReason.STOP, reply.stop_reason
        if reply.reading is not None:
            part.aside = reply.reading.take()
        return part


def _joined(parts: list[Part]) -> Part:
    first, last = parts[0], parts[-1]
    return Part(
        last.index,
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [logprobs for part in parts for logprobs in part.logprobs],
        last.finish,
        last.stop_reason,
        first.opening,
        joined(part.aside for part in parts),
    )


def _mean_logprob(part: Part) -> float:
    """Return how likely a generated token of the choice was on average."""
    return fmean(each.chosen for each in part.logprobs) if part.logprobs else 0.0
