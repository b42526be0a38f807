"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest, Unsupported
from infd.http import sampling, send
from infd.http.body import read
from infd.http.conversation import last_words, template_kwargs
from infd.http.formats.chat import ChatFormat
from infd.http.prompt import cut, render
from infd.http.schema.chat import ChatRequest
from infd.http.service import EXCHANGE, SERVICE
from infd.http.submit import Wanted, submit

if TYPE_CHECKING:
    from aiohttp import web

    from infd.config import LimitsConfig
    from infd.http.prompt import Prompt
    from infd.http.schema.tools import Tool
    from infd.http.served import ServedModel
    from infd.offload import Offload
    from infd.text.markup import Reading

DECODER: Final = msgspec.json.Decoder(ChatRequest)


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service, exchange = request.app[SERVICE], request[EXCHANGE]
    said, size = await read(request, DECODER)
    check(said, service.config.limits)
    async with (
        send.promised(request, stream=bool(said.stream)) as events,
        service.engine.admit(said.n or 1, size) as ticket,
    ):
        exchange.begin(ticket, said.request_id)
        served = service.model()
        model = served.name(said.model)
        _check_calls(said, served)
        prompt = await read_prompt(said, size, served, service.offload)
        readings = _readings(said, prompt, served)
        wanted = Wanted(
            prompt_param="messages",
            max_tokens=_max_tokens(said),
            default_max_tokens=None,
            choices=said.n or 1,
            answers=said.n or 1,
            logprobs=(said.top_logprobs or 0) if said.logprobs else None,
            prompt_logprobs={} if said.prompt_logprobs is None else {"prompt_logprobs": said.prompt_logprobs},
            tellings=1,
            continues=bool(said.continue_final_message),
            readings=readings,
        )
        limits = service.config.limits
        answer = await submit(said, wanted, [prompt], served, ticket, exchange, service.offload, limits)
        format = ChatFormat(
            said, ticket, model=model, tokenizer=served.tokenizer, prompt=prompt.ids, marked_up=readings[0] is not None
        )
        return await send.answer(request, answer, format, events)


async def read_prompt(said: ChatRequest, body_bytes: int, served: ServedModel, offload: Offload) -> Prompt:
    """Return what the model reads. Raises InvalidRequest, PromptTooLong."""
    prompt = await render(
        said.messages,
        body_bytes,
        served,
        offload,
        tools=_tools(said),
        add_generation_prompt=said.add_generation_prompt,
        continue_final_message=said.continue_final_message,
        kwargs=template_kwargs(said, served.template),
        add_special_tokens=said.add_special_tokens,
        must_fit=said.truncate_prompt_tokens is None,
    )
    return cut(prompt, said, _max_tokens(said), served)


def check(said: ChatRequest, limits: LimitsConfig) -> None:
    """Refuse what no model could answer. Raises InvalidRequest, Unsupported."""
    _check_tools(said)
    sampling.check(said, limits)
    if said.top_logprobs is not None:
        if not said.logprobs:
            raise InvalidRequest("top_logprobs is only for requests with logprobs: true", param="top_logprobs")
        if said.top_logprobs > limits.top_logprobs:
            raise InvalidRequest(f"top_logprobs is at most {limits.top_logprobs}", param="top_logprobs")


def _check_tools(said: ChatRequest) -> None:
    if said.tools is not None and not said.tools:
        raise InvalidRequest("tools is empty: leave it out", param="tools")
    choice = said.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if not said.tools:
        raise InvalidRequest("tool_choice is only for requests with tools", param="tool_choice")
    what = "'required'" if choice == "required" else "of one tool"
    raise Unsupported(f"tool_choice {what}", param="tool_choice")


def _tools(said: ChatRequest) -> list[Tool] | None:
    """Return the tools that the answer may call.

    With tool_choice "none" the model is not even told of them: it would call them, and nobody would read the call.
    """
    return None if said.tool_choice == "none" else said.tools


def _check_calls(said: ChatRequest, served: ServedModel) -> None:
    """Refuse tools if nobody knows how this model calls them. Raises Unsupported."""
    if _tools(said) is not None and served.syntax.tools is None:
        raise Unsupported(
            "calling tools with this model, whose chat template writes no call that infd can read"
            " (the setting --tool-parser may know better),",
            param="tools",
        )


def _readings(said: ChatRequest, prompt: Prompt, served: ServedModel) -> list[Reading | None]:
    """Return what takes each choice's thoughts and calls out of its text; None where all of it is content."""
    continued = last_words(said.messages) if said.continue_final_message else ""
    tools = _tools(said)
    names = None if tools is None else [tool.function.name for tool in tools]
    most_calls = 1 if said.parallel_tool_calls is False else None
    return [served.syntax.start(prompt.end, continued, names=names, most_calls=most_calls) for _ in range(said.n or 1)]


def _max_tokens(said: ChatRequest) -> int | None:
    return said.max_completion_tokens or said.max_tokens
