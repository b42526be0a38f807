"""Beam search: of all continuations of the running beams, each step keeps the likeliest.

A client of the engine: each step of the search is one submission of the request's ticket. It asks for one token after
each running beam, with the likeliest alternatives. The prefix cache holds the beams' common pages.

Nothing is drawn, so temperature, top_p, top_k, min_p and seed have no effect.

The search is that of transformers' `generate(num_beams=...)`, and gives the same beams. Source: `_beam_search` of
transformers 5.
"""

from __future__ import annotations

import math
from copy import copy
from heapq import nlargest
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from infd.engine.streams.stream import Choices
from infd.errors import InvalidRequest, RequestFailed, Unsupported
from infd.request import FinishReason, Generate, TokenLogprobs, pick

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.config import LimitsConfig
    from infd.engine.admission.ticket import Ticket
    from infd.engine.streams.stream import Delta
    from infd.http.schema.openai import OpenAIRequest
    from infd.request import Request, SamplingParams
    from infd.text.detokenize import Detokenizer
    from infd.text.reply import Reply
    from infd.text.stops import StopSearch

# Fields that depend on the tokens generated so far, which are of several beams, or on random numbers.
_UNSUPPORTED: Final = (
    *("presence_penalty", "frequency_penalty", "bad_words", "logprob_token_ids", "logprobs_mode"),
    "return_routed_experts",
)


class Search(Struct, frozen=True):
    """The settings of a search.

    width           number of beams
    length_penalty  a finished beam's score is its log-probability / tokens ** length_penalty
    early_stopping  True: end once `width` beams have finished; False: once no running beam's present score exceeds the
                    worst of these; "never": once none can exceed it at any length
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


def requested(request: OpenAIRequest, width: int, limits: LimitsConfig) -> Search | None:
    """Return the search that a request asks for; None: none. Raises InvalidRequest, Unsupported.

    width  number of beams
    """
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(request, name) not in (None, neutral):
                raise InvalidRequest(f"{name} is only for requests with use_beam_search: true", param=name)
        return None
    if width > limits.beams:
        raise InvalidRequest(f"a search has at most {limits.beams} beams (limits.beams): lower n or best_of", param="n")
    for name in _UNSUPPORTED:
        if getattr(request, name):
            raise Unsupported(f"{name} with use_beam_search", param=name)
    if request.max_tokens == 0:
        raise InvalidRequest("with max_tokens 0 no answer is searched", param="max_tokens")
    if request.prompt_logprobs is not None:
        raise Unsupported("prompt_logprobs with use_beam_search", param="prompt_logprobs")
    penalty, early = request.length_penalty, request.early_stopping
    return Search(width, 1.0 if penalty is None else penalty, False if early is None else early)


async def search(
    settings: Search, ticket: Ticket, requests: Sequence[Request], replies: Sequence[Reply], client: str
) -> Choices:
    """Search the likeliest answers of each request; return them as choices that have ended, the best of each first.

    ticket   reserves `width` choices for each request
    replies  one for each choice of each request

    Raises as `Ticket.submit`, and the error of a failed choice.
    """
    firsts = accumulate((request.choices for request in requests), initial=0)  # index of each request's first reply
    searches = [
        _Beams(settings, request, _Text(*replies[first].fork()))
        for request, first in zip(requests, firsts, strict=False)
    ]
    prompt_tokens = cached_tokens = None
    ended = None
    submitted: dict[_Beam | None, int] = {}
    while running := [(beams, beam) for beams in searches if ended is None for beam in beams.running]:
        steps = [replace(beams.step(beam), continues=submitted.get(beam.parent)) for beams, beam in running]
        submitted = {beam: index for index, (_, beam) in enumerate(running)}
        choices = await ticket.submit(*steps, client=client, last=False)
        found: list[TokenLogprobs | None] = [None] * len(steps)
        async for index, delta in choices:
            if delta.finish is FinishReason.ERROR:
                raise _error(delta)
            if delta.finish is FinishReason.ABORT:
                ended = FinishReason.ABORT
            found[index] = delta.logprobs[0] if delta.logprobs else found[index]
        if prompt_tokens is None:
            prompt_tokens, cached_tokens = ticket.prompt_tokens, ticket.cached_tokens
        if ended is None:
            scores = iter(found)
            for beams in searches:
                beams.advance([score for _, score in zip(beams.running, scores, strict=False) if score is not None])
    answers = Choices(replies, _nothing)
    ticket.answer(answers.streams, prompt_tokens or 0, cached_tokens or 0)
    streams = iter(answers.streams)
    for beams, request in zip(searches, requests, strict=True):
        best = beams.best()
        for number in range(request.choices):
            tokens, logprobs, finish = best[number] if number < len(best) else ((), (), FinishReason.LENGTH)
            next(streams).push(list(tokens), list(logprobs), ended or finish)
    return answers


def _nothing() -> None:
    """No-op: the choices are complete, so no reader is paused."""


def _error(delta: Delta) -> Exception:
    return delta.error or RequestFailed("the engine gave no reason")


class _Beam(Struct, frozen=True, eq=False):
    """One continuation of the prompt.

    parent    the beam without its last token; None: the prompt
    logprobs  of `token`
    total     sum of the tokens' log-probabilities
    score     `total`; of a finished beam, divided by its length's penalty
    finish    None: the beam runs
    """

    ids: tuple[int, ...]
    text: _Text
    parent: _Beam | None = None
    token: int = -1
    logprobs: TokenLogprobs = TokenLogprobs(0.0)
    length: int = 0
    total: float = 0.0
    score: float = 0.0
    finish: FinishReason | None = None

    def path(self) -> Iterator[_Beam]:
        """Yield the beams from this one to the first token's."""
        beam = self
        while beam.parent is not None:
            yield beam
            beam = beam.parent


class _Text:
    """The text of a beam, in which stop strings are searched."""

    __slots__ = ("_detokenizer", "_search")

    def __init__(self, detokenizer: Detokenizer, search: StopSearch | None) -> None:
        self._detokenizer = detokenizer
        self._search = search

    def with_token(self, token: int, *, ignore: bool) -> tuple[_Text, bool]:
        """Return the text with another token, and whether a stop string ends in it, unless `ignore`d."""
        if self._search is None:
            return self, False
        text = _Text(copy(self._detokenizer), copy(self._search))
        assert text._search is not None
        return text, text._search.feed(text._detokenizer.feed((token,)), ignore=ignore) is not None


class _Beams:
    """The search of one request.

    running  the beams that may continue, likeliest first; empty once the search has ended
    """

    def __init__(self, settings: Search, request: Request, text: _Text) -> None:
        """Raises Unsupported.

        text  the text before the first token
        """
        generate = pick(Generate, request.wants)
        assert generate is not None, "a request without tokens to generate is not searched"
        for field, sampler in (
            ("samplers", generate.sampling.chain),
            ("dry_multiplier", generate.sampling.dry),
            ("mirostat", generate.sampling.mirostat),
        ):
            if sampler is not None:
                raise Unsupported("llama.cpp's samplers with use_beam_search", param=field)
        if request.constraint is not None:
            raise Unsupported("a constraint of the answer with use_beam_search", param="use_beam_search")
        self._settings = settings
        self._request = request
        self._ends = generate.end_ids
        self._params = generate.sampling
        self._most = generate.sampling.max_tokens
        # So that `width` beams go on, even if for each an end id is likelier.
        self._kept = max(2, 1 + len(self._ends)) * settings.width
        self._finished: list[_Beam] = []
        self.running = [_Beam(request.prompt, text)]

    def step(self, beam: _Beam) -> Request:
        """Return the request of a running beam's next tokens."""
        asked = self._params
        shaped = asked.logit_bias or asked.allowed_token_ids or asked.repetition_penalty != 1
        params: SamplingParams = replace(
            asked,
            max_tokens=1,
            min_tokens=0,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            # End ids are left out of a beam's first min_tokens.
            logprobs=max(self._kept + (len(self._ends) if asked.min_tokens else 0), asked.logprobs or 0),
            logprobs_mode="processed_logprobs" if shaped else "raw_logprobs",
        )
        request = self._request
        wants = (Generate(params, self._ends),)
        return replace(request, prompt=beam.ids, wants=wants, choices=1, speculative=False, prediction=())

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Continue the running beams, given the likeliest next tokens of each."""
        width, length = self._settings.width, self.running[0].length + 1 if self.running else 0
        candidates = nlargest(
            self._kept,
            (
                (beam.total + logprob, -number, -rank)
                for number, (beam, scored) in enumerate(zip(self.running, found, strict=True))
                for rank, (token, logprob) in enumerate(zip(scored.top_ids, scored.top, strict=True))
                if logprob > -math.inf and not (length <= self._params.min_tokens and token in self._ends)
            ),
        )
        full = self._settings.early_stopping is True and len(self._finished) >= width
        running: list[_Beam] = []
        for place, (total, number, rank) in enumerate(candidates):
            beam = self._continued(self.running[-number], found[-number], -rank, total)
            if beam.finish is None:
                running.append(beam)
            elif place < width and not full:
                self._finished.append(beam)
        self._finished = nlargest(width, self._finished, key=attrgetter("score"))
        self.running = running[:width]
        if self._ended(length):
            self.running = []

    def _continued(self, beam: _Beam, found: TokenLogprobs, rank: int, total: float) -> _Beam:
        token, length, reported = found.top_ids[rank], beam.length + 1, self._params.logprobs or 0
        text, stopped = beam.text.with_token(token, ignore=length <= self._params.min_tokens)
        finish = None
        if token in self._ends:
            finish = FinishReason.STOP
        elif stopped or length == self._most:
            finish = FinishReason.LENGTH  # the choice's `Reply` finds the stop string again, and reports it
        return _Beam(
            ids=(*beam.ids, token),
            text=text,
            parent=beam,
            token=token,
            logprobs=TokenLogprobs(found.top[rank], found.top_ids[:reported], found.top[:reported]),
            length=length,
            total=total,
            score=total if finish is None else self._penalized(total, length),
            finish=finish,
        )

    def _ended(self, length: int) -> bool:
        """Return whether no running beam can improve the finished ones."""
        early = self._settings.early_stopping
        if not self.running or len(self._finished) < self._settings.width:
            return not self.running
        if early is True:
            return True
        longest = self._most if early == "never" and self._settings.length_penalty > 0 else length
        return self._penalized(self.running[0].total, longest) <= self._finished[-1].score

    def _penalized(self, total: float, length: int) -> float:
        return total / math.pow(length, self._settings.length_penalty)

    def best(self) -> list[tuple[Sequence[int], Sequence[TokenLogprobs], FinishReason]]:
        """Return tokens, log-probabilities and end of the beams, the best first; running ones after finished ones."""
        found: list[tuple[Sequence[int], Sequence[TokenLogprobs], FinishReason]] = []
        for beam in (*self._finished, *self.running):
            path = list(beam.path())[::-1]
            logprobs = [one.logprobs for one in path] if self._params.logprobs is not None else []
            found.append(([one.token for one in path], logprobs, beam.finish or FinishReason.LENGTH))
        return found
