"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http import beams, sampling
from infd.http.apis.api import Api
from infd.http.constraints import CallChoice, call_choice, constrained, constrained_calls
from infd.http.conversation import (
    final_text,
    function_specs,
    offered_tools,
    template_documents,
    template_messages,
    template_tools,
    tool_specs,
)
from infd.http.formats.chat import ChatFormat
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.generation import Conversation, Generation
from infd.http.schema.chat import ChatRequest
from infd.http.schema.tools import ChosenFunction
from infd.http.thinking import template_variables, thinking

if TYPE_CHECKING:
    from infd.config import Config, LimitsConfig
    from infd.http.constraints import Constrained
    from infd.http.conversation import ToolSpec


def generation(request: ChatRequest, body_bytes: int, config: Config) -> Generation:
    """Check a chat request and convert it to a Generation. Raises InvalidRequest, Unsupported."""
    _check(request, config.limits)
    choices = request.n or 1
    answer = constrained(request)
    return Generation(
        fields=request,
        input=_conversation(request, body_bytes, answer),
        prompt_param="messages",
        body_bytes=body_bytes,
        choices=choices,
        returned=choices,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        max_tokens_param="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
        default_max_tokens=None,
        constrained=answer,
        stop_strings=sampling.stop_strings(request),
        search=beams.requested(request, choices, config.limits),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prediction=None if request.prediction is None else request.prediction.text,
        prompt_logprobs={} if request.prompt_logprobs is None else {"prompt_logprobs": request.prompt_logprobs},
        routed=bool(request.return_routed_experts),
    )


def _conversation(request: ChatRequest, body_bytes: int, answer: Constrained | None) -> Conversation:
    tools, choice = _tools(request)
    return Conversation(
        messages=partial(template_messages, request.messages),
        body_bytes=body_bytes,
        tools=None if tools is None else partial(template_tools, tools),
        documents=partial(template_documents, request.documents) if request.documents else None,
        offered=None if tools is None else offered_tools(tools),
        max_calls=1 if request.parallel_tool_calls is False or request.functions else None,
        constrained_calls=constrained_calls(tools or (), choice, answer),
        add_generation_prompt=request.add_generation_prompt,
        continued=final_text(request.messages) if request.continue_final_message else None,
        thinking=thinking(request),
        verbosity=None if request.verbosity is None else (request.verbosity, "verbosity"),
        template_variables=template_variables(request),
    )


def _tools(request: ChatRequest) -> tuple[list[ToolSpec] | None, CallChoice]:
    """Return the tools that the prompt contains, and their choice. Raises InvalidRequest, Unsupported.

    If calls are switched off, the prompt contains no tools, because infd would not parse calls.
    """
    if request.functions is None:
        tools = None if request.tool_choice == "none" or request.tools is None else tool_specs(request.tools)
        return tools, call_choice(request.tool_choice, request.parallel_tool_calls)
    functions = None if request.function_call == "none" else function_specs(request.functions)
    if isinstance(request.function_call, ChosenFunction):
        return functions, CallChoice(True, (request.function_call.name,), "function_call.name", parallel=False)
    return functions, CallChoice(parallel=False)


def _check(request: ChatRequest, limits: LimitsConfig) -> None:
    """Refuse a request that is invalid for every model. Raises InvalidRequest, Unsupported."""
    _check_tools(request)
    sampling.check(request, limits)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise InvalidRequest("top_logprobs is only for requests with logprobs: true", param="top_logprobs")
        if request.top_logprobs > limits.top_logprobs:
            raise InvalidRequest(f"top_logprobs is at most {limits.top_logprobs}", param="top_logprobs")


def _check_tools(request: ChatRequest) -> None:
    if request.tools is not None and not request.tools:
        raise InvalidRequest("tools is empty: leave it out", param="tools")
    if request.functions is not None and (request.tools or request.tool_choice is not None):
        raise InvalidRequest("functions is the older form of tools: send one of them", param="functions")
    if request.functions is None and isinstance(request.function_call, ChosenFunction):
        raise InvalidRequest("function_call is only for requests with functions", param="function_call")
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if not request.tools:
        raise InvalidRequest("tool_choice is only for requests with tools", param="tool_choice")


CHAT: Final = Api(msgspec.json.Decoder(ChatRequest), generation, ChatFormat, OPENAI_ERRORS)
