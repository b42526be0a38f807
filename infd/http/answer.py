"""The answer to one generation as it grows: token ids become text, choice by choice."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import RequestFailed
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from infd.engine.streams.stream import Choices, Delta, Taker
    from infd.request import TokenLogprobs
    from infd.text.markup import Aside
    from infd.text.reply import Reply


class ChoiceDelta(Struct):
    """What is new in one choice.

    logprobs     one per token, where requested
    stop_reason  the stop string, or the id among the request's stop_token_ids, that finished the choice
    prompt       in a choice's first delta, where it repeats its prompt
    aside        thoughts and calls that were taken out of its text
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptReport | None = None
    aside: Aside | None = None


class PromptReport(Struct):
    """What the choices of one prompt repeat of it: one report for all of them.

    echo    its text; None where not requested
    scored  whether its log-probabilities were requested
    scores  one per token but the first, once the first choice has brought them; none if it was aborted before
    """

    token_ids: tuple[int, ...]
    echo: str | None
    scored: bool
    scores: Sequence[TokenLogprobs] = ()

    @property
    def logprobs(self) -> Iterator[TokenLogprobs | None]:
        """Yield one per token; None for the first, which nothing precedes, and for all if the scores are missing."""
        return chain(repeat(None, len(self.token_ids) - len(self.scores)), self.scores)


class Answer:
    """Iterate to get all deltas that have come since the last look; raises what ended a choice in an error.

    choices_each  choices generated for each prompt
    reports       one per prompt, or none
    stop_ids      end ids that the request names itself
    show_stop_id  whether the text of such an id belongs to the answer
    """

    def __init__(
        self,
        choices: Choices,
        replies: Sequence[Reply],
        *,
        choices_each: int,
        reports: Sequence[PromptReport],
        stop_ids: Collection[int],
        show_stop_id: bool,
    ) -> None:
        self._choices = choices
        self._replies = replies
        self._choices_each = choices_each
        self._reports = reports
        self._unreported = set(range(len(replies))) if reports else set()
        self._stop_ids = stop_ids
        self._show_stop_id = show_stop_id

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        choices = self._choices
        while not choices.ready:
            await choices.news()
        deltas = [self._read(*choices.take())]
        while choices.ready:
            deltas.append(self._read(*choices.take()))
        return deltas

    @property
    def single(self) -> bool:
        """Whether the answer is one choice."""
        return len(self._replies) == 1

    def offered(self, taker: Taker) -> AbstractContextManager[None]:
        """Offer tokens to `taker` within this block, as `Choices.offered` does, except a choice's first tokens if it
        repeats its prompt: the iteration brings these, with the report.
        """

        def unless_unreported(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
            return index not in self._unreported and taker(index, token_ids, logprobs)

        return self._choices.offered(unless_unreported if self._unreported else taker)

    def delta(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChoiceDelta:
        """Return the delta of new tokens in a choice that has not finished."""
        reply = self._replies[index]
        delta = ChoiceDelta(index, reply.take(), token_ids, logprobs)
        if reply.reading is not None:
            delta.aside = reply.reading.take()
        return delta

    def _read(self, index: int, new: Delta) -> ChoiceDelta:
        delta = self._generated(index, new)
        if index in self._unreported:
            self._unreported.remove(index)
            self._report(delta, new.prompt_logprobs)
        return delta

    def _report(self, delta: ChoiceDelta, scores: Sequence[TokenLogprobs]) -> None:
        """Add the prompt's report to a choice's first delta. The scores come with the first choice."""
        prompt, choice = divmod(delta.index, self._choices_each)
        delta.prompt = self._reports[prompt]
        if not choice:
            delta.prompt.scores = scores
        else:
            assert prompt * self._choices_each not in self._unreported, "a choice began before the scores were known"

    def _generated(self, index: int, new: Delta) -> ChoiceDelta:
        if new.finish is None:
            return self.delta(index, new.token_ids, new.logprobs)
        if new.finish is FinishReason.ERROR:
            error = new.error or RequestFailed("the engine gave no reason")
            raise error.with_traceback(None)  # many streams may end with one error object: each raises it anew
        stop_id = new.stop_id if new.stop_id in self._stop_ids else None
        reply = self._replies[index]
        if stop_id is not None and self._show_stop_id:
            reply.feed([stop_id])
        delta = ChoiceDelta(index, reply.finish(), new.token_ids, new.logprobs, new.finish, stop_id)
        if reply.stop_reason is not None:  # the last bytes may complete a stop string after the engine ended it
            delta.finish, delta.stop_reason = FinishReason.STOP, reply.stop_reason
        if reply.reading is not None:
            delta.aside = reply.reading.take()
        return delta
