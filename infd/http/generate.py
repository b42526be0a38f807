"""Answer a `Generation` of any API: queue its requests, read the tokens, write the answer in the API's format.

One loop reads the deltas of every answer, streamed or not, and passes them to an output, which sends each delta as
events, or collects all deltas into one body.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from infd.constraint import AfterThought, Calls, Continuation, Headed
from infd.errors import GrammarFailed, InvalidRequest, Unsupported
from infd.http import beams, samplers, sampling
from infd.http.answer import Answer, PromptReport
from infd.http.ending import end
from infd.http.formats.base import ENTRY_BYTES, Accepted
from infd.http.generation import Conversation
from infd.http.outputs import Body, Folded, Stream
from infd.http.prompt import bad_word_ids, predicted_ids, read_prompts, text_of
from infd.request import Generate, Request, Route, Score
from infd.text.reply import Reply
from infd.text.stops import StopStrings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from infd.config import Config, LimitsConfig
    from infd.constraint import Constraint, Plain, Restriction
    from infd.engine.admission.ticket import Ticket
    from infd.http.backend import Backend
    from infd.http.exchange import Events, Exchange
    from infd.http.formats.base import Format
    from infd.http.generation import Generation
    from infd.http.outputs import Output
    from infd.http.pieces import Pieces
    from infd.http.prompt import Prompt
    from infd.http.served_model import ServedModel
    from infd.request import Breakers, Want
    from infd.text.markup import Reading

# The text that continues a prompt is decoded together with this many of the prompt's last tokens: many tokenizers drop
# a space before the first word of a text, and a character may span several tokens.
CONTEXT_TOKENS: Final = 8


async def generate(
    generation: Generation,
    format_of: Callable[[Accepted], Format],
    exchange: Exchange,
    backend: Backend,
    events: Events | None = None,
    *,
    before_end: Callable[[], Awaitable[None]] | None = None,
    within: Ticket | None = None,
) -> Pieces:
    """Return the body of the answer; with `events`, stream the answer to `events` and return an empty list.

    before_end  awaited before the last event of a stream; its error fails the request
    within      the ticket of `Engine.admit_rounds`, if the answer is one round of a request

    Raises RequestError, and the error of a failed choice. Returning, raising and cancellation all end the engine's work
    on the generation.
    """
    tenant = exchange.account.tenant
    backend.model().require_generation()
    async with backend.engine.admit(generation.places, generation.body_bytes, within, tenant=tenant) as ticket:
        try:
            return await _answer(generation, format_of, exchange, backend, events, before_end, ticket)
        finally:
            end(exchange, ticket, backend)


async def _answer(
    generation: Generation,
    format_of: Callable[[Accepted], Format],
    exchange: Exchange,
    backend: Backend,
    events: Events | None,
    before_end: Callable[[], Awaitable[None]] | None,
    ticket: Ticket,
) -> Pieces:
    """Answer a generation that has a place in the queue; see `generate`."""
    exchange.begin(ticket, generation.fields.request_id)
    served = backend.model()
    model = served.name(generation.fields.model)
    _check_calls(generation, served)
    _check_budget(generation, served)
    generation = _with_all_alternatives(generation, served, backend.config.limits)
    prompts = await read_prompts(generation, served, backend.offload)
    answer = await _queue(generation, prompts, served, ticket, exchange, backend)
    prompt_ids = [prompt.ids for prompt in prompts]
    accepted = Accepted(
        ticket,
        model,
        served.tokenizer,
        prompt_ids,
        answer.marked_up,
        fingerprint=backend.fingerprint(),
        context_tokens=served.max_model_len,
    )
    format = format_of(accepted)
    exchange.errors = format
    if events is None:
        body = Folded(answer, format) if format.folds else Body(answer, format, generation, backend.offload)
        return await _copy_deltas(answer, body, direct=True)
    stream = Stream(answer, format, events, backend.offload, before_end)
    # A separate task reads the tokens, because waking this task resumes every coroutine around it. Tokens
    # of several choices are not consumed directly, so that one write sends all tokens of a step.
    return await asyncio.ensure_future(_copy_deltas(answer, stream, direct=answer.single))


async def _copy_deltas(answer: Answer, output: Output, *, direct: bool) -> Pieces:
    with answer.consumed_by(output.consume) if direct else nullcontext():
        async for deltas in answer:
            await output.add(deltas)
    return await output.end()


async def _queue(
    generation: Generation,
    prompts: Sequence[Prompt],
    served: ServedModel,
    ticket: Ticket,
    exchange: Exchange,
    backend: Backend,
) -> Answer:
    """Queue one request for each prompt, and return the answer to read. Raises RequestError."""
    fields = generation.fields
    scores_bytes = _checked_prompt_logprobs(generation, prompts, backend.config.limits)
    if generation.routed:
        _check_routed(generation, prompts, served, backend.config.limits)
    scored = bool(generation.prompt_logprobs)
    skip_special = fields.skip_special_tokens is not False
    if fields.spaces_between_special_tokens is False and not skip_special:
        _check_no_spaces(served)
    bad_words = await bad_word_ids(fields.bad_words or (), served, backend.offload)
    breakers = await samplers.breakers(fields, served, backend.offload)
    prediction: tuple[int, ...] = ()
    if generation.prediction is not None:
        drafted = backend.config.scheduler.speculative != "off" and fields.speculative is not False
        prediction = await predicted_ids(generation.prediction, served, backend.offload, drafted=drafted)
    adapter = served.adapter(fields.model)
    continues = not isinstance(generation.input, Conversation) or generation.input.continued is not None

    def constraint(prompt: Prompt) -> Restriction | None:
        found: Constraint | None
        found = continued = _constraint(generation, prompt, served)
        tokenizer = served.tokenizer
        if continued is not None and continues and tokenizer.drops_space:
            preceding = prompt.ids[-CONTEXT_TOKENS:]
            if not tokenizer.drops_space_after(preceding, skip_special_tokens=skip_special):
                found = Continuation(continued)
        return _budgeted(generation, prompt, served, found)

    requests = [
        Request(
            id=ticket.id if len(prompts) == 1 else f"{ticket.id}-{number}",
            prompt=prompt.ids,
            wants=_wants(generation, prompt, served, bad_words, breakers, backend.config),
            choices=generation.choices,
            priority=exchange.priority(fields.priority),
            adapter=adapter,
            tenant=exchange.account.tenant.name,
            share=exchange.account.tenant.share,
            cache_salt=fields.cache_salt or "",
            speculative=fields.speculative is not False,
            prediction=prediction,
            constraint=constraint(prompt),
        )
        for number, prompt in enumerate(prompts)
    ]
    exchange.account.reserve(sum(request.most_tokens for request in requests))
    backend.held.prompt_logprobs.hold(scores_bytes, exchange.held)
    if generation.routed:
        backend.held.experts.hold(_most_routed_bytes(requests, served), exchange.held)
    reports: list[PromptReport] = []
    if generation.echo or scored:
        for prompt in prompts:
            echo = None
            if generation.echo:
                echo = await text_of(prompt, served, backend.offload, skip_special_tokens=skip_special)
            reports.append(PromptReport(prompt.ids, echo, scored))
    show_stop = bool(fields.include_stop_str_in_output)
    stops = StopStrings(
        generation.stop_strings,
        included=show_stop,
        min_tokens=fields.min_tokens or 0,
    )
    request_of_choice = [request for request in requests for _ in range(request.choices)]
    replies = [
        Reply(
            served.tokenizer,
            stops,
            skip_special_tokens=skip_special,
            preceding=request.prompt[-CONTEXT_TOKENS:] if continues else (),
            reading=reading,
            mark_ids=served.syntax.mark_ids if reading is not None else frozenset(),
            mark_tokens=served.syntax.tokens,
        )
        for request, reading in zip_longest(request_of_choice, _readings(generation, prompts, served))
    ]
    try:
        if generation.search is None:
            choices = await ticket.submit(*requests, watchers=replies, client=exchange.client)
        else:
            choices = await beams.search(generation.search, ticket, requests, replies, exchange.client)
    except (GrammarFailed, Unsupported) as error:
        error.param = error.param or _constraint_param(generation)
        raise
    return Answer(
        choices,
        replies,
        choices_per_prompt=generation.choices,
        reports=reports,
        stop_ids=frozenset(fields.stop_token_ids or ()),
        include_stop_id=show_stop,
    )


def _wants(
    generation: Generation,
    prompt: Prompt,
    served: ServedModel,
    bad_words: tuple[tuple[int, ...], ...],
    breakers: Breakers,
    config: Config,
) -> tuple[Want, ...]:
    """Return the work requested for a prompt: generation, scoring, or both. Raises InvalidRequest, PromptTooLong."""
    param = generation.prompt_param
    if not prompt.ids:
        raise InvalidRequest("the prompt is empty", param=param)
    params = sampling.sampling_params(
        generation.fields,
        served,
        max_tokens=sampling.max_tokens(
            len(prompt.ids),
            generation.max_tokens,
            generation.default_max_tokens,
            served,
            prompt_param=param,
            param=generation.max_tokens_param,
        ),
        choices=generation.choices,
        choices_param="n" if generation.returned > 1 else "best_of",
        logprobs=sampling.alternatives(generation.logprobs, served, config.limits),
        bad_words=bad_words,
        breakers=breakers,
        logprobs_mode=config.server.logprobs_mode,
    )
    wants: list[Want] = []
    if params.max_tokens:
        ends = sampling.end_ids(generation.fields, served)
        wants.append(Generate(params, ends if generation.fields.ignore_eos else ends | prompt.end_ids))
    if generation.prompt_logprobs:
        wants.append(Score(max(generation.prompt_logprobs.values())))
    if generation.routed:
        wants.append(Route())
    return tuple(wants)


def _budgeted(
    generation: Generation, prompt: Prompt, served: ServedModel, constraint: Constraint | None
) -> Restriction | None:
    """Return `constraint`, extended by the request's token budget for the answer's thought, if set."""
    conversation = generation.input
    if not isinstance(conversation, Conversation) or (tokens := conversation.thinking.budget) is None:
        return constraint
    budget = served.syntax.budget(
        tokens, prompt.end, conversation.continued or "", calls=conversation.offered is not None, answer=constraint
    )
    return constraint if budget is None else budget


def _constraint(
    generation: Generation, prompt: Prompt, served: ServedModel
) -> Plain | Calls | Headed | AfterThought | None:
    """Return the constraint of an answer's thought, calls and content; None: unconstrained. Raises Unsupported."""
    plain = None if generation.constrained is None else generation.constrained.constraint
    conversation = generation.input
    if not isinstance(conversation, Conversation):
        return plain
    continued = conversation.continued or ""
    header = served.syntax.header(prompt.end, continued)
    constraint: Plain | Calls | Headed | None = plain
    if header is not None and (plain is not None or conversation.constrained_calls is not None):
        constraint = Headed(header, plain)
    if (calls := conversation.constrained_calls) is not None:
        syntax = served.syntax.grammar
        if syntax is None:
            raise Unsupported(f"constraining this model's tool calls ({served.syntax.unforced}),", param=calls.param)
        otherwise = None if calls.required else constraint
        constraint = Calls(syntax, calls.tools, calls.required, calls.parallel, otherwise)
    if constraint is None:
        return None
    thought = served.syntax.thought(prompt.end, continued)
    return constraint if thought is None else AfterThought(thought, constraint)


def _constraint_param(generation: Generation) -> str | None:
    """Return the request field that constrains the answer, for error messages."""
    calls = generation.input.constrained_calls if isinstance(generation.input, Conversation) else None
    if generation.constrained is not None and not (calls is not None and calls.required):
        return generation.constrained.param
    if calls is None and isinstance(generation.input, Conversation):
        return generation.input.thinking.params.get("budget")
    return None if calls is None else calls.param


def _readings(generation: Generation, prompts: Sequence[Prompt], served: ServedModel) -> list[Reading | None]:
    """Return the parser of each choice's thoughts and calls; None: all text is content. Empty if the input is Texts."""
    conversation = generation.input
    if not isinstance(conversation, Conversation):
        return []
    (prompt,) = prompts
    return [
        served.syntax.start(
            prompt.end,
            conversation.continued or "",
            offered=conversation.offered,
            most_calls=conversation.max_calls,
        )
        for _ in range(generation.choices)
    ]


def _check_calls(generation: Generation, served: ServedModel) -> None:
    """Refuse tools if infd cannot parse this model's tool calls. Raises Unsupported."""
    conversation = generation.input
    if isinstance(conversation, Conversation) and conversation.offered is not None and not served.syntax.reads_calls:
        raise Unsupported(
            "calling tools with this model, whose chat template writes no call that infd can read"
            " (the setting --tool-parser may know better),",
            param="tools",
        )


def _check_budget(generation: Generation, served: ServedModel) -> None:
    """Refuse a token budget for thoughts if infd cannot parse this model's thoughts. Raises Unsupported."""
    conversation = generation.input
    if isinstance(conversation, Conversation) and conversation.thinking.budget is not None:
        param = conversation.thinking.params["budget"]
        if not served.syntax.reads_thoughts:
            raise Unsupported(
                f"{param} with this model, whose chat template writes no thought that infd can read"
                " (the setting --reasoning-parser may know better),",
                param=param,
            )


def _with_all_alternatives(generation: Generation, served: ServedModel, limits: LimitsConfig) -> Generation:
    """Replace -1 in `prompt_logprobs` by the number of all tokens. Raises InvalidRequest."""
    if -1 not in generation.prompt_logprobs.values():
        return generation
    found = {
        field: sampling.alternatives(k, served, limits, field) or 0 for field, k in generation.prompt_logprobs.items()
    }
    return replace(generation, prompt_logprobs=found)


def _check_routed(generation: Generation, prompts: Sequence[Prompt], served: ServedModel, limits: LimitsConfig) -> None:
    """Raise InvalidRequest if the experts of the prompts' tokens exceed limits.routed_experts_bytes."""
    if served.experts is None:
        return  # the engine refuses the request
    tokens = generation.returned * sum(len(prompt.ids) for prompt in prompts)
    size = tokens * served.experts.token_bytes
    if size > limits.routed_experts_bytes:
        raise InvalidRequest(
            f"the experts of {tokens} prompt tokens are {size} bytes; at most {limits.routed_experts_bytes} are sent"
            " (limits.routed_experts_bytes): lower n, or send fewer or shorter prompts",
            param="return_routed_experts",
        )


def _most_routed_bytes(requests: Sequence[Request], served: ServedModel) -> int:
    """Return the most bytes of experts that the choices of all requests report together."""
    if served.experts is None:
        return 0  # the engine refuses the request
    # Each choice reports its prompt.
    tokens = sum(request.most_tokens + (request.choices - 1) * len(request.prompt) for request in requests)
    return tokens * served.experts.token_bytes


def _checked_prompt_logprobs(generation: Generation, prompts: Sequence[Prompt], limits: LimitsConfig) -> int:
    """Return the most bytes of the answer's prompt log-probabilities.

    Raises InvalidRequest if these exceed limits.prompt_logprobs_bytes.
    """
    requested, answers = generation.prompt_logprobs, generation.prompt_repeats
    tokens, entries = sum(len(prompt.ids) for prompt in prompts), sum(k + 1 for k in requested.values())
    largest = answers * tokens * entries * ENTRY_BYTES
    if largest > limits.prompt_logprobs_bytes:
        field = max(requested, key=requested.__getitem__)
        raise InvalidRequest(
            f"{entries} log-probabilities of each of {tokens} prompt tokens in {answers} answers may come to {largest}"
            f" bytes; at most {limits.prompt_logprobs_bytes} are sent (limits.prompt_logprobs_bytes):"
            f" lower {f'n or {field}' if answers > 1 else field}, or send fewer or shorter prompts",
            param=field,
        )
    return largest


def _check_no_spaces(served: ServedModel) -> None:
    """Raise Unsupported if the tokenizer's decoder is unknown: an unknown one may put spaces between special tokens."""
    if served.tokenizer.pieces(skip_special_tokens=False) is None:
        raise Unsupported(
            "spaces_between_special_tokens: false with this model's tokenizer", param="spaces_between_special_tokens"
        )
