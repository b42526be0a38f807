"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import msgspec

from infd.errors import InvalidRequest
from infd.http import sampling, send
from infd.http.body import read
from infd.http.formats.completions import CompletionFormat
from infd.http.prompt import check_length, encode
from infd.http.schema.completions import CompletionRequest
from infd.http.service import EXCHANGE, SERVICE
from infd.http.submit import submit

if TYPE_CHECKING:
    from aiohttp import web

    from infd.config import Config

DECODER: Final = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's

Prompt = str | list[int]


async def complete(request: web.Request) -> web.StreamResponse:
    """Continue one text, or several."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    said, size = await read(request, DECODER)
    prompts = _prompts(said)
    _check(said, len(prompts), service.config)
    async with service.engine.admit((said.n or 1) * len(prompts), size) as ticket:
        exchange.begin(ticket, said.request_id)
        served = service.model()
        model = served.name(said.model)
        encoded: list[tuple[int, ...]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(prompt, served, param="prompt")
                special = said.add_special_tokens is not False
                encoded.append(await encode(prompt, served, service.offload, add_special_tokens=special))
            else:
                sampling.check_ids(prompt, served, "prompt")
                encoded.append(tuple(prompt))
        answer = await submit(
            said,
            encoded,
            served,
            ticket,
            exchange,
            prompt_param="prompt",
            max_tokens=said.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=said.logprobs,
        )
        format = CompletionFormat(said, ticket, model=model, tokenizer=served.tokenizer, prompts=encoded)
        return await send.answer(request, answer, format, stream=bool(said.stream))


def _check(said: CompletionRequest, prompts: int, config: Config) -> None:
    sampling.check(said, config.limits)
    if (said.n or 1) * prompts > config.scheduler.max_waiting:
        raise InvalidRequest(
            f"{prompts} prompts with {said.n or 1} answers each are more than the queue ever holds", param="prompt"
        )
    if said.logprobs is not None and said.logprobs > config.limits.top_logprobs:
        raise InvalidRequest(f"logprobs is at most {config.limits.top_logprobs}", param="logprobs")


def _prompts(said: CompletionRequest) -> list[Prompt]:
    """Tell the four forms of a prompt apart. Raises InvalidRequest for a mixture."""
    prompt = said.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds in ({str}, {list}):
        return cast("list[Prompt]", prompt)
    raise InvalidRequest("prompt is a text, texts, token ids, or lists of token ids, not a mixture", param="prompt")
