"""Anthropic's POST /v1/messages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.constraint import JsonSchema
from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http import sampling
from infd.http.apis.api import Api
from infd.http.constraints import CallChoice, Constrained, constrained_calls, is_set, json_text
from infd.http.conversation import ToolSpec, json_dict, offered_tools, template_tools
from infd.http.formats.messages import MESSAGES_ERRORS, MessagesFormat
from infd.http.generation import Conversation, Generation
from infd.http.schema.anthropic import MessagesRequest
from infd.http.thinking import Thinking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.config import Config
    from infd.http.schema.anthropic import (
        Block,
        InputMessage,
        InputTool,
        InputToolChoice,
        MessagesFields,
    )

# Claude Code's system prompt begins with a block that starts with this text and differs between requests. The block is
# dropped, because otherwise no request would find its prefix in the cache.
_BILLING: Final = "x-anthropic-billing-header"
_SCHEMA: Final = "output_config.format.schema"


def generation(request: MessagesRequest, body_bytes: int, config: Config) -> Generation:
    """Check a messages request and convert it to a Generation. Raises InvalidRequest, Unsupported."""
    check(request)
    if _has_calls(request.messages[-1]):
        param = f"messages[{len(request.messages) - 1}].content"
        raise InvalidRequest("a tool_use is followed by a message with its tool_result", param=param)
    stop_strings = tuple(request.stop_sequences or ())
    sampling.check_fields(request, stop_strings, config.limits, stop_param="stop_sequences")
    return Generation(
        fields=request,
        input=conversation(request, body_bytes),
        prompt_param="messages",
        body_bytes=body_bytes,
        default_max_tokens=request.max_tokens,  # unlike max_tokens, lowered to the rest of the context
        constrained=_constrained(request),
        stop_strings=stop_strings,
    )


def check(request: MessagesFields) -> None:
    """Refuse a conversation that is invalid for every model. Raises InvalidRequest, Unsupported."""
    sampling.refuse_unsupported(request, request.NEUTRAL)
    if request.tool_choice is not None and request.tool_choice.type != "none" and not request.tools:
        raise InvalidRequest("tool_choice is only for requests with tools", param="tool_choice")
    for number, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise Unsupported(f"a tool of type {shorten(tool.type)!r}", param=f"tools[{number}].type")


def conversation(request: MessagesFields, body_bytes: int) -> Conversation:
    """Return the conversation of a request. Raises InvalidRequest, Unsupported."""
    choice = request.tool_choice
    offered = () if choice is not None and choice.type == "none" else request.tools or ()
    tools = [_spec(number, tool) for number, tool in enumerate(offered)]
    final, at = request.messages[-1], f"messages[{len(request.messages) - 1}].content"
    continues = final.role == "assistant" and not _has_calls(final)
    return Conversation(
        messages=partial(_template_messages, request),
        body_bytes=body_bytes,
        tools=partial(template_tools, tools) if tools else None,
        offered=offered_tools(tools) if tools else None,
        max_calls=1 if choice is not None and choice.disable_parallel_tool_use else None,
        constrained_calls=constrained_calls(tools, _call_choice(choice), _constrained(request)),
        continued=_text_of(final.content, at) if continues else None,
        thinking=_thinking(request),
        # A request without `thinking` switches thoughts off, if the template can.
        template_variables={} if request.thinking is not None else {"enable_thinking": False, "thinking": False},
    )


def _thinking(request: MessagesFields) -> Thinking:
    """Return a request's settings for thoughts. With type "adaptive" the model decides whether to think.

    Clients send an effort to every model, so a level that the model does not know is replaced by the nearest one.
    """
    config, output = request.thinking, request.output_config
    effort = None if output is None else output.effort
    if config is None or config.type == "adaptive":
        return Thinking(preferred=effort)
    if config.type == "disabled":
        effort = None
    params = {"enabled": "thinking.type", "budget": "thinking.budget_tokens"}
    return Thinking(preferred=effort, enabled=config.type == "enabled", budget=config.budget_tokens, params=params)


def _spec(number: int, tool: InputTool) -> ToolSpec:
    return ToolSpec(tool.name, tool.description, tool.input_schema, tool.strict, f"tools[{number}]", "input_schema")


def _call_choice(choice: InputToolChoice | None) -> CallChoice:
    if choice is None:
        return CallChoice()
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("tool_choice of type tool needs a name", param="tool_choice.name")
    names = (choice.name or "",) if choice.type == "tool" else None
    required = choice.type in ("any", "tool")
    return CallChoice(required, names, "tool_choice.name", parallel=not choice.disable_parallel_tool_use)


def _constrained(request: MessagesFields) -> Constrained | None:
    if request.output_config is None or request.output_config.format is None:
        return None
    schema = request.output_config.format.schema
    if not is_set(schema):
        raise InvalidRequest("a format of type json_schema needs a schema", param=_SCHEMA)
    return Constrained(JsonSchema(json_text(schema, _SCHEMA)), _SCHEMA, beside_calls=True)


def _template_messages(request: MessagesFields) -> list[dict[str, Any]]:
    """Return the messages as dicts for a chat template. Raises InvalidRequest, Unsupported, naming the block."""
    messages: list[dict[str, Any]] = []
    if isinstance(request.system, str):
        messages.append({"role": "system", "content": request.system})
    elif system := [part for part in _texts(request.system or (), "system") if not part["text"].startswith(_BILLING)]:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(request.messages):
        convert = _assistant if message.role == "assistant" else _user
        messages += convert(message, f"messages[{number}]")
    return messages


def _user(message: InputMessage, at: str) -> Iterator[dict[str, Any]]:
    """Yield a message for each tool_result block and for each run of text blocks, in order."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[dict[str, str]] = []
    for number, block in enumerate(message.content):
        where = f"{at}.content[{number}]"
        if block.type != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            yield {"role": message.role, "content": texts}
            texts = []
        if block.tool_use_id is None:
            raise InvalidRequest("a tool_result has a tool_use_id", param=f"{where}.tool_use_id")
        content: Any = block.content or ""
        if not isinstance(content, str):
            content = _texts(content, f"{where}.content")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts or not message.content:
        yield {"role": message.role, "content": texts or ""}


def _has_calls(message: InputMessage) -> bool:
    """Return whether a message of the assistant calls tools."""
    return message.role == "assistant" and any(block.type == "tool_use" for block in _blocks(message))


def _blocks(message: InputMessage) -> Sequence[Block]:
    return () if isinstance(message.content, str) else message.content


def _assistant(message: InputMessage, at: str) -> Iterator[dict[str, Any]]:
    read: dict[str, Any] = {"role": "assistant", "content": _text_of(message.content, f"{at}.content")}
    thoughts, calls = [], []
    for number, block in enumerate(_blocks(message)):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{at}.content[{number}]"))
    if thoughts:
        read["reasoning_content"] = "".join(thoughts)
    if calls:
        read["tool_calls"] = calls
    yield read


def _call(block: Block, at: str) -> dict[str, Any]:
    if not block.id or not block.name:
        raise InvalidRequest("a tool_use has an id and a name", param=at)
    arguments = json_dict(bytes(block.input) if is_set(block.input) else b"{}", f"{at}.input")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text_of(content: str | Sequence[Block], at: str) -> str:
    """Return the text of an assistant's message, without thoughts and calls."""
    if isinstance(content, str):
        return content
    said = (
        _text(block, f"{at}[{number}]")["text"]
        for number, block in enumerate(content)
        if block.type not in ("thinking", "redacted_thinking", "tool_use")
    )
    return "".join(said)


def _texts(blocks: Sequence[Block], at: str) -> list[dict[str, str]]:
    return [_text(block, f"{at}[{number}]") for number, block in enumerate(blocks)]


def _text(block: Block, at: str) -> dict[str, str]:
    if block.type != "text":
        raise Unsupported(f"content of type {shorten(block.type)!r}", param=f"{at}.type")
    if block.text is None:
        raise InvalidRequest("a block of type 'text' has a text", param=f"{at}.text")
    return {"type": "text", "text": block.text}


MESSAGES: Final = Api(msgspec.json.Decoder(MessagesRequest), generation, MessagesFormat, MESSAGES_ERRORS)
