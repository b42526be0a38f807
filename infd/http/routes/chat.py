"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http import sampling, send
from infd.http.body import read
from infd.http.formats.chat import ChatFormat
from infd.http.prompt import cut, render
from infd.http.schema.chat import ChatRequest
from infd.http.service import EXCHANGE, SERVICE
from infd.http.submit import Wanted, submit

if TYPE_CHECKING:
    from aiohttp import web

    from infd.config import LimitsConfig
    from infd.http.prompt import Prompt
    from infd.http.served import ServedModel
    from infd.offload import Offload

DECODER: Final = msgspec.json.Decoder(ChatRequest)


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    said, size = await read(request, DECODER)
    check(said, service.config.limits)
    async with service.engine.admit(said.n or 1, size) as ticket:
        exchange.begin(ticket, said.request_id)
        served = service.model()
        model = served.name(said.model)
        prompt = await read_prompt(said, size, served, service.offload)
        wanted = Wanted(
            prompt_param="messages",
            max_tokens=_max_tokens(said),
            default_max_tokens=None,
            choices=said.n or 1,
            answers=said.n or 1,
            logprobs=(said.top_logprobs or 0) if said.logprobs else None,
            prompt_logprobs=said.prompt_logprobs,
            continues=bool(said.continue_final_message),
        )
        answer = await submit(said, wanted, [prompt], served, ticket, exchange, service.offload)
        format = ChatFormat(said, ticket, model=model, tokenizer=served.tokenizer, prompt=prompt.ids)
        return await send.answer(request, answer, format, stream=bool(said.stream))


async def read_prompt(said: ChatRequest, body_bytes: int, served: ServedModel, offload: Offload) -> Prompt:
    """Return what the model reads. Raises InvalidRequest, PromptTooLong."""
    prompt = await render(
        said.messages,
        body_bytes,
        served,
        offload,
        add_generation_prompt=said.add_generation_prompt,
        continue_final_message=said.continue_final_message,
        kwargs=said.chat_template_kwargs,
        add_special_tokens=said.add_special_tokens,
        must_fit=said.truncate_prompt_tokens is None,
    )
    return cut(prompt, said, _max_tokens(said), served)


def check(said: ChatRequest, limits: LimitsConfig) -> None:
    """Refuse what no model could answer. Raises InvalidRequest, Unsupported."""
    if bytes(said.tools).translate(None, b" \t\r\n") == b"[]":
        raise InvalidRequest("tools is empty: leave it out", param="tools")
    sampling.check(said, limits)
    if said.top_logprobs is not None:
        if not said.logprobs:
            raise InvalidRequest("top_logprobs is only for requests with logprobs: true", param="top_logprobs")
        if said.top_logprobs > limits.top_logprobs:
            raise InvalidRequest(f"top_logprobs is at most {limits.top_logprobs}", param="top_logprobs")


def _max_tokens(said: ChatRequest) -> int | None:
    return said.max_completion_tokens or said.max_tokens
