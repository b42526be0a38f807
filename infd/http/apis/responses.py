"""OpenAI's POST /v1/responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from infd.constraint import JsonObject, JsonSchema
from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http import sampling
from infd.http.constraints import CallChoice, Constrained, constrained_calls, is_set, json_text, sole, structured
from infd.http.conversation import ToolSpec, custom_spec, offered_tools, template_tools
from infd.http.generation import Conversation, Generation
from infd.http.remote_tools import NO_REMOTE_TOOLS
from infd.http.response_items import template_messages
from infd.http.schema.chat import MESSAGES
from infd.http.schema.responses import InputItem, ResponseToolChoice
from infd.http.thinking import Thinking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.config import Config
    from infd.http.remote_tools import RemoteTools
    from infd.http.schema.responses import AllowedTool, ResponsesFields, ResponsesRequest, ResponseTool, TextFormat

LOGPROBS: Final = "message.output_text.logprobs"
_SCHEMA: Final = "text.format.schema"


def generation(
    request: ResponsesRequest,
    history: list[InputItem],
    body_bytes: int,
    config: Config,
    remote: RemoteTools = NO_REMOTE_TOOLS,
) -> Generation:
    """Check a responses request and convert it to a Generation. Raises InvalidRequest, Unsupported.

    history     input and output items of earlier responses, which precede the request's input
    body_bytes  size of the request's body and of `history`
    remote      tools of MCP servers that the request offers
    """
    stop_strings = sampling.stop_strings(request)
    sampling.check_fields(request, stop_strings, config.limits)
    wanted = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    if (request.top_logprobs or 0) > config.limits.top_logprobs:
        raise InvalidRequest(f"top_logprobs is at most {config.limits.top_logprobs}", param="top_logprobs")
    if request.truncation == "auto" and request.truncate_prompt_tokens is None:
        request.truncate_prompt_tokens = -1
    return Generation(
        fields=request,
        input=conversation(request, history, body_bytes, remote, request.max_tool_calls),
        prompt_param="input",
        body_bytes=body_bytes,
        max_tokens=request.max_output_tokens,
        max_tokens_param="max_output_tokens",
        constrained=_constrained(request),
        stop_strings=stop_strings,
        logprobs=(request.top_logprobs or 0) if wanted else None,
    )


def conversation(
    request: ResponsesFields,
    history: list[InputItem],
    body_bytes: int,
    remote: RemoteTools = NO_REMOTE_TOOLS,
    max_calls: int | None = None,
) -> Conversation:
    """Return the conversation of a request: `history`, then its input. Raises InvalidRequest, Unsupported."""
    sampling.refuse_unsupported(request, request.NEUTRAL)
    items = [*history, *input_items(request)]
    if not items:
        raise InvalidRequest("input is required", param="input")
    if len(items) > MESSAGES:
        raise InvalidRequest(f"a conversation has at most {MESSAGES} items, earlier responses included", param="input")
    tools = list(_specs(request.tools or (), remote))
    if request.tool_choice not in (None, "none", "auto") and not tools:
        raise InvalidRequest("tool_choice is only for requests with tools", param="tool_choice")
    choice = _call_choice(request, remote)
    if request.parallel_tool_calls is False:
        max_calls = 1 if max_calls is None else min(1, max_calls)
    if request.tool_choice == "none":
        tools = []
    effort = None if request.reasoning is None else request.reasoning.effort
    verbosity = None if request.text is None else request.text.verbosity
    return Conversation(
        messages=partial(template_messages, request.instructions, items, len(history), remote),
        body_bytes=body_bytes,
        tools=partial(template_tools, tools) if tools else None,
        offered=offered_tools(tools) if tools else None,
        max_calls=max_calls,
        constrained_calls=constrained_calls(tools, choice, _constrained(request)),
        thinking=Thinking(effort=effort, params={"effort": "reasoning.effort"}),
        verbosity=(verbosity, "text.verbosity") if verbosity is not None else None,
    )


def input_items(request: ResponsesFields) -> list[InputItem]:
    """Return the items of the input; an input that is a text becomes a user's message."""
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    return request.input or []


def _specs(tools: Sequence[ResponseTool], remote: RemoteTools) -> Iterator[ToolSpec]:
    for number, tool in enumerate(tools):
        if tool.type == "mcp":
            yield from (remote_tool.spec for remote_tool in remote.at(number))
        else:
            yield _spec(number, tool)


def _spec(number: int, tool: ResponseTool) -> ToolSpec:
    at = f"tools[{number}]"
    if tool.type not in ("function", "custom"):
        raise Unsupported(f"a tool of type {shorten(tool.type)!r}", param=f"{at}.type")
    if tool.name is None:
        raise InvalidRequest("a tool has a name", param=f"{at}.name")
    if tool.type == "function":
        return ToolSpec(tool.name, tool.description, tool.parameters, tool.strict, at)
    grammar = None
    if (format := tool.format) is not None and format.type == "grammar":
        if format.syntax is None or format.definition is None:
            raise InvalidRequest("a format of type grammar has a syntax and a definition", param=f"{at}.format")
        grammar = format.syntax, format.definition
    return custom_spec(tool.name, tool.description, grammar, at, "format")


def _call_choice(request: ResponsesFields, remote: RemoteTools) -> CallChoice:
    choice, parallel = request.tool_choice, request.parallel_tool_calls is not False
    if not isinstance(choice, ResponseToolChoice):
        return CallChoice(choice == "required", parallel=parallel)
    if choice.type == "allowed_tools":
        names = tuple(name for tool in choice.tools or () for name in _names(tool, remote))
        if not names:
            raise InvalidRequest("allowed_tools names tools", param="tool_choice.tools")
        return CallChoice(choice.mode == "required", names, "tool_choice.tools", parallel)
    if choice.type == "mcp":
        if not (names := _names(choice, remote)):
            raise InvalidRequest("the request offers no such tool of an MCP server", param="tool_choice")
        return CallChoice(True, names, "tool_choice", parallel=choice.name is None and parallel)
    if choice.type not in ("function", "custom"):
        raise Unsupported(f"tool_choice of type {shorten(choice.type)!r}", param="tool_choice.type")
    return CallChoice(True, _names(choice, remote), "tool_choice.name", parallel=False)


def _names(tool: ResponseToolChoice | AllowedTool, remote: RemoteTools) -> tuple[str, ...]:
    """Return the model's names of the tools that an entry of a tool_choice selects."""
    if tool.type != "mcp":
        return (tool.name or "",)
    return remote.names(None if tool.server_label is UNSET else tool.server_label, tool.name)


def _constrained(request: ResponsesFields) -> Constrained | None:
    found = [] if request.text is None or request.text.format is None else _of_format(request.text.format)
    return sole([*found, *(() if request.structured_outputs is None else structured(request.structured_outputs))])


def _of_format(format: TextFormat) -> list[Constrained]:
    """Return the constraint of a format; an empty list if text of the format is free."""
    if format.type == "json_object":
        return [Constrained(JsonObject(), "text.format", beside_calls=True)]
    if format.type == "json_schema":
        if not is_set(format.schema):
            raise InvalidRequest("text.format of type json_schema needs a schema", param=_SCHEMA)
        return [Constrained(JsonSchema(json_text(format.schema, _SCHEMA)), _SCHEMA, beside_calls=True)]
    return []
