"""From encoded prompts to an answer: one request each, one reply per choice."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.errors import InvalidRequest, Unsupported
from infd.http import sampling
from infd.http.answer import Answer, Opening
from infd.http.formats.base import ENTRY_BYTES
from infd.http.prompt import forbidden, written
from infd.request import Generate, Request, Score
from infd.text.reply import Reply
from infd.text.stops import StopStrings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.config import LimitsConfig
    from infd.engine.admission.ticket import Ticket
    from infd.http.prompt import Prompt
    from infd.http.schema.sampling import GenerationRequest
    from infd.http.served import ServedModel
    from infd.http.service import Exchange
    from infd.offload import Offload
    from infd.request import SamplingParams, Want
    from infd.text.markup import Reading


CONTEXT_TOKENS: Final = 8  # no character takes as many


class Wanted(Struct, frozen=True, kw_only=True):
    """What the APIs say each in their own words.

    prompt_param        where the prompts stand in the request
    max_tokens          None: default_max_tokens, or, if that is None too, all that fit
    choices             made of each prompt
    answers             and of these returned
    logprobs            as in SamplingParams
    prompt_logprobs     the same of the prompt's tokens, by the fields that ask for them
    tellings            how many of a prompt's answers tell them
    continues           whether an answer goes on in the middle of the prompt's text
    echo                whether each choice begins with its prompt
    readings            of the choices, in order, where their text has markup to take out
    """

    prompt_param: str
    max_tokens: int | None
    default_max_tokens: int | None
    choices: int
    answers: int
    logprobs: int | None
    prompt_logprobs: Mapping[str, int]
    tellings: int
    continues: bool
    echo: bool = False
    readings: Sequence[Reading | None] = ()


async def submit(
    said: GenerationRequest,
    wanted: Wanted,
    prompts: Sequence[Prompt],
    served: ServedModel,
    ticket: Ticket,
    exchange: Exchange,
    offload: Offload,
    limits: LimitsConfig,
) -> Answer:
    """Queue the prompts, and return the answer to read. Raises RequestError."""
    _check_told(wanted, prompts, limits)
    scored = max(wanted.prompt_logprobs.values(), default=None)
    skip_special = said.skip_special_tokens is not False
    if said.spaces_between_special_tokens is False and not skip_special:
        _check_no_spaces(served)
    bad_words = await forbidden(said.bad_words or (), served, offload)
    end_ids = sampling.end_ids(said, served)
    adapter = served.adapter(said.model)
    requests = [
        Request(
            id=ticket.id if len(prompts) == 1 else f"{ticket.id}-{number}",
            prompt=prompt.ids,
            wants=_wants(_sampling(said, wanted, prompt, served, bad_words), end_ids, scored),
            choices=wanted.choices,
            priority=exchange.priority(said.priority),
            adapter=adapter,
            tenant=exchange.tenant,
            cache_salt=said.cache_salt or "",
        )
        for number, prompt in enumerate(prompts)
    ]
    openings: list[Opening] = []
    if wanted.echo or scored is not None:
        for prompt in prompts:
            echo = await written(prompt, served, offload, skip_special_tokens=skip_special) if wanted.echo else None
            openings.append(Opening(prompt.ids, echo, scored is not None))
    strings = sampling.stop_strings(said)
    stops = StopStrings(strings) if strings else None
    show_stop = bool(said.include_stop_str_in_output)
    requested = [request for request in requests for _ in range(request.choices)]
    replies = [
        Reply(
            served.tokenizer,
            stops,
            include_stop_str_in_output=show_stop,
            min_tokens=said.min_tokens or 0,
            skip_special_tokens=skip_special,
            after=request.prompt[-CONTEXT_TOKENS:] if wanted.continues else (),
            reading=reading,
            shown=served.syntax.shown if reading is not None else frozenset(),
        )
        for request, reading in zip_longest(requested, wanted.readings)
    ]
    choices = await ticket.submit(*requests, watchers=replies, client=exchange.client)
    return Answer(
        choices,
        replies,
        choices_each=wanted.choices,
        answers_each=wanted.answers,
        openings=openings,
        stop_ids=frozenset(said.stop_token_ids or ()),
        show_stop_id=show_stop,
    )


def _wants(sampling: SamplingParams, end_ids: frozenset[int], scored: int | None) -> tuple[Want, ...]:
    """scored: as Score.top; None: not scored."""
    generate = (Generate(sampling, end_ids),) if sampling.max_tokens else ()
    return generate if scored is None else (*generate, Score(scored))


def _sampling(
    said: GenerationRequest,
    wanted: Wanted,
    prompt: Prompt,
    served: ServedModel,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty", param=wanted.prompt_param)
    return sampling.sampling_params(
        said,
        served,
        max_tokens=sampling.max_tokens(
            len(prompt.ids), wanted.max_tokens, wanted.default_max_tokens, served, prompt_param=wanted.prompt_param
        ),
        choices=wanted.choices,
        logprobs=wanted.logprobs,
        bad_words=bad_words,
    )


def _check_told(wanted: Wanted, prompts: Sequence[Prompt], limits: LimitsConfig) -> None:
    """Refuse an answer that may have to tell too much of its prompts. Raises InvalidRequest."""
    asked, answers = wanted.prompt_logprobs, wanted.tellings
    tokens, entries = sum(len(prompt.ids) for prompt in prompts), sum(k + 1 for k in asked.values())
    largest = answers * tokens * entries * ENTRY_BYTES
    if largest > limits.prompt_logprobs_bytes:
        field = max(asked, key=asked.__getitem__)
        raise InvalidRequest(
            f"{entries} log-probabilities of each of {tokens} prompt tokens in {answers} answers may come to {largest}"
            f" bytes; at most {limits.prompt_logprobs_bytes} are sent (limits.prompt_logprobs_bytes):"
            f" lower {f'n or {field}' if answers > 1 else field}, or send fewer or shorter prompts",
            param=field,
        )


def _check_no_spaces(served: ServedModel) -> None:
    """The decoders that infd knows put no space between special tokens; of any other that is not known."""
    if served.tokenizer.pieces(skip_special_tokens=False) is None:
        raise Unsupported(
            "spaces_between_special_tokens: false with this model's tokenizer", param="spaces_between_special_tokens"
        )
