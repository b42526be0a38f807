"""The answer to one Generation: the new token ids of its choices, converted to text and tool calls."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import GrammarFailed, NothingAllowed, RequestFailed
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from infd.engine.streams.stream import Choices, Consumer, Delta
    from infd.errors import RequestError
    from infd.request import RoutedExperts, TokenLogprobs
    from infd.text.markup import Aside
    from infd.text.reply import Reply


class ChoiceDelta(Struct):
    """The new part of one choice.

    logprobs     one entry per token if requested, else empty
    stop_reason  the stop string, or the id among the request's stop_token_ids, that finished the choice
    end_id       the token id that finished the choice: one of stop_token_ids, or an end id of the model
    routed       the experts of all tokens but the last, only in the last delta of a choice that reports them
    prompt       the prompt's report, only in the first delta of a choice that repeats its prompt
    aside        new thoughts and tool calls, which `text` does not contain
    error        the error of a failed choice, if other choices have not failed; `finish` is then ERROR
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptReport | None = None
    aside: Aside | None = None
    error: RequestError | None = None
    end_id: int | None = None
    routed: RoutedExperts | None = None

    @property
    def matched(self) -> str | int | None:
        """The stop string or token id that finished the choice."""
        return self.end_id if self.stop_reason is None else self.stop_reason


class PromptReport(Struct):
    """A prompt's token ids, text and log-probabilities, as its choices repeat them. All choices share one report.

    echo    the prompt's text; None: not requested
    scored  whether the prompt's log-probabilities were requested
    scores  log-probabilities of every prompt token except the first, set by the first delta of the prompt's first
            choice; empty before, and if that choice is aborted before the prompt is scored
    """

    token_ids: tuple[int, ...]
    echo: str | None
    scored: bool
    scores: Sequence[TokenLogprobs] = ()

    @property
    def logprobs(self) -> Iterator[TokenLogprobs | None]:
        """Yield one entry per prompt token: None for the first token, and for every token if `scores` is empty."""
        return chain(repeat(None, len(self.token_ids) - len(self.scores)), self.scores)


class Answer:
    """An async iterator; each item is a list of the deltas since the previous item.

    Iteration raises the error of a failed choice; GrammarFailed and NothingAllowed only once every choice has failed.

    choices_per_prompt  choices generated for each prompt
    reports             one per prompt; empty if the choices do not repeat their prompts
    stop_ids            the request's stop_token_ids
    include_stop_id     whether the text of a choice includes the text of the stop id that finished the choice
    """

    def __init__(
        self,
        choices: Choices,
        replies: Sequence[Reply],
        *,
        choices_per_prompt: int,
        reports: Sequence[PromptReport],
        stop_ids: Collection[int],
        include_stop_id: bool,
    ) -> None:
        self._choices = choices
        self._replies = replies
        self._choices_per_prompt = choices_per_prompt
        self._reports = reports
        self._unreported = set(range(len(replies))) if reports else set()
        self._stop_ids = stop_ids
        self._include_stop_id = include_stop_id
        self._unfailed = len(replies)  # number of choices that have not failed

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        choices = self._choices
        while not choices.ready:
            await choices.next_delta()
        deltas = [self._read(*choices.take())]
        while choices.ready:
            deltas.append(self._read(*choices.take()))
        return deltas

    @property
    def single(self) -> bool:
        """Whether the answer is one choice."""
        return len(self._replies) == 1

    @property
    def marked_up(self) -> bool:
        """Whether thoughts or tool calls are parsed out of the choices."""
        return any(reply.reading is not None for reply in self._replies)

    def consumed_by(self, consumer: Consumer) -> AbstractContextManager[None]:
        """Pass new tokens to `consumer` within this block; see `Choices.consumed_by`.

        If choices repeat their prompts, the first tokens of each choice are buffered instead, and iteration returns
        them together with the prompt's report.
        """

        def consume_reported(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
            return index not in self._unreported and consumer(index, token_ids, logprobs)

        return self._choices.consumed_by(consume_reported if self._unreported else consumer)

    def delta(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChoiceDelta:
        """Return the delta for new tokens of an unfinished choice."""
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
        """Add the prompt's report to a choice's first delta. The first choice of a prompt delivers `scores`."""
        prompt, choice = divmod(delta.index, self._choices_per_prompt)
        delta.prompt = self._reports[prompt]
        if not choice:
            delta.prompt.scores = scores
        else:
            assert prompt * self._choices_per_prompt not in self._unreported, (
                "a choice began before the scores were known"
            )

    def _generated(self, index: int, new: Delta) -> ChoiceDelta:
        if new.finish is None:
            return self.delta(index, new.token_ids, new.logprobs)
        if new.finish is FinishReason.ERROR:
            return self._failed(index, new)
        stop_id = new.stop_id if new.stop_id in self._stop_ids else None
        reply = self._replies[index]
        if stop_id is not None and self._include_stop_id:
            reply.feed([stop_id])
        delta = ChoiceDelta(index, reply.finish(), new.token_ids, new.logprobs, new.finish, stop_id)
        delta.end_id, delta.routed = new.stop_id, new.routed
        if reply.stop_reason is not None:  # the end of the text completed a stop string
            delta.finish, delta.stop_reason = FinishReason.STOP, reply.stop_reason
        if reply.reading is not None:
            delta.aside = reply.reading.take()
        return delta

    def _failed(self, index: int, new: Delta) -> ChoiceDelta:
        """Return the last delta of a failed choice. Raises the choice's error if the whole answer fails."""
        self._unfailed -= 1
        error = new.error or RequestFailed("the engine gave no reason")
        if not isinstance(error, GrammarFailed | NothingAllowed) or not self._unfailed:
            raise error.with_traceback(None)  # several streams may raise one error object, whose traceback would grow
        reply = self._replies[index]
        delta = ChoiceDelta(index, reply.finish(), new.token_ids, new.logprobs, FinishReason.ERROR, error=error)
        if reply.reading is not None:
            delta.aside = reply.reading.take()
        return delta
