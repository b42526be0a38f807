"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import msgspec

from infd.errors import InvalidRequest
from infd.http import sampling, send
from infd.http.body import read
from infd.http.formats.completions import CompletionFormat
from infd.http.prompt import Prompt, check_length, cut, encode
from infd.http.schema.completions import CompletionRequest
from infd.http.service import EXCHANGE, SERVICE
from infd.http.submit import Wanted, submit

if TYPE_CHECKING:
    from aiohttp import web

    from infd.config import Config
    from infd.http.served import ServedModel
    from infd.offload import Offload

DECODER: Final = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's

Written = str | list[int]


async def complete(request: web.Request) -> web.StreamResponse:
    """Continue one text, or several."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    said, size = await read(request, DECODER)
    written = prompts_of(said)
    check(said, len(written), service.config)
    async with (
        send.promised(request, stream=bool(said.stream)) as events,
        service.engine.admit(_choices(said) * len(written), size) as ticket,
    ):
        exchange.begin(ticket, said.request_id)
        served = service.model()
        model = served.name(said.model)
        prompts = await read_prompts(said, written, served, service.offload)
        limits = service.config.limits
        answer = await submit(said, _wanted(said), prompts, served, ticket, exchange, service.offload, limits)
        ids = [prompt.ids for prompt in prompts]
        format = CompletionFormat(said, ticket, model=model, tokenizer=served.tokenizer, prompts=ids)
        return await send.answer(request, answer, format, events)


async def read_prompts(
    said: CompletionRequest, written: list[Written], served: ServedModel, offload: Offload
) -> list[Prompt]:
    """Return what the model reads. Raises InvalidRequest, PromptTooLong."""
    prompts: list[Prompt] = []
    for each in written:
        if isinstance(each, str):
            check_length(each, served, param="prompt", must_fit=said.truncate_prompt_tokens is None)
            special = said.add_special_tokens is not False
            prompt = Prompt(await encode(each, served, offload, add_special_tokens=special), each)
        else:
            sampling.check_ids(each, served, "prompt")
            prompt = Prompt(tuple(each))
        prompts.append(cut(prompt, said, DEFAULT_MAX_TOKENS if said.max_tokens is None else said.max_tokens, served))
    return prompts


def check(said: CompletionRequest, prompts: int, config: Config) -> None:
    """Refuse what no model could answer. Raises InvalidRequest, Unsupported."""
    sampling.check(said, config.limits)
    n, choices = said.n or 1, _choices(said)
    if choices < n:
        raise InvalidRequest(f"best_of {choices} is less than n {n}", param="best_of")
    if choices > config.limits.choices:
        raise InvalidRequest(f"best_of is at most {config.limits.choices}", param="best_of")
    if choices > n and said.stream:
        raise InvalidRequest("the best are known at the end only: they cannot be streamed", param="best_of")
    if choices * prompts > config.scheduler.max_waiting:
        raise InvalidRequest(
            f"{prompts} prompts with {choices} answers each are more than the queue ever holds", param="prompt"
        )
    if said.logprobs is not None and said.logprobs > config.limits.top_logprobs:
        raise InvalidRequest(f"logprobs is at most {config.limits.top_logprobs}", param="logprobs")
    if said.max_tokens == 0 and not said.echo and said.prompt_logprobs is None:
        raise InvalidRequest("max_tokens 0 is only for requests with echo or prompt_logprobs", param="max_tokens")


def _choices(said: CompletionRequest) -> int:
    return said.best_of or said.n or 1


def _wanted(said: CompletionRequest) -> Wanted:
    n, choices = said.n or 1, _choices(said)
    # The logprobs of an echo are its tokens' too.
    told = {"prompt_logprobs": said.prompt_logprobs, "logprobs": said.logprobs if said.echo else None}
    return Wanted(
        prompt_param="prompt",
        max_tokens=said.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        choices=choices,
        answers=n,
        logprobs=0 if said.logprobs is None and choices > n else said.logprobs,
        prompt_logprobs={field: k for field, k in told.items() if k is not None},
        tellings=n,
        echo=bool(said.echo),
        continues=True,
    )


def prompts_of(said: CompletionRequest) -> list[Written]:
    """Tell the four forms of a prompt apart. Raises InvalidRequest for a mixture."""
    prompt = said.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds in ({str}, {list}):
        return cast("list[Written]", prompt)
    raise InvalidRequest("prompt is a text, texts, token ids, or lists of token ids, not a mixture", param="prompt")
