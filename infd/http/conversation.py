"""Convert the messages and tools of a chat request to the form that chat templates expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http.json_body import exceeds_depth
from infd.http.sampling import refuse_unsupported
from infd.http.schema.tools import SCHEMA_DEPTH
from infd.http.schema.unsupported import ABSENT
from infd.text.tools.offered import Offered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.http.schema.chat import Message
    from infd.http.schema.tools import Called, Tool


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as dicts for a chat template. Raises InvalidRequest, Unsupported, naming the message."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as dicts for a chat template. The order of keys is fixed, so that equal tools render equally.

    Raises InvalidRequest, naming the tool.
    """
    return [_tool(tool, f"tools[{number}].function") for number, tool in enumerate(tools)]


def offered_tools(tools: Sequence[Tool]) -> Offered:
    """Return the tools that an answer may call."""
    schemas = ((tool.function.name, bytes(tool.function.parameters)) for tool in tools)
    return Offered({name: b"" if schema == bytes(ABSENT) else schema for name, schema in schemas})


def final_text(messages: Sequence[Message]) -> str:
    """Return the text of the final message."""
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def _message(message: Message, at: str) -> dict[str, Any]:
    refuse_unsupported(message, message.NEUTRAL, path=f"{at}.")
    if message.role == "function":
        raise Unsupported(f"the role {shorten(message.role)!r}, which 'tool' has replaced,", param=f"{at}.role")
    # OpenAI's clients send the role "developer", which most open models' templates lack.
    read: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("only the assistant calls tools", param=f"{at}.tool_calls")
    if message.content is not None:
        read["content"] = _content(message, at)
    elif not message.tool_calls:
        raise InvalidRequest("content is required", param=f"{at}.content")
    if message.name is not None:
        read["name"] = message.name
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        read["reasoning_content"] = reasoning
    if message.tool_calls:
        read["tool_calls"] = [
            _call(call, f"{at}.tool_calls[{number}].function") for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    return read


def _content(message: Message, at: str) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content or ()):
        where = f"{at}.content[{number}]"
        if part.type != "text":
            raise Unsupported(f"content of type {shorten(part.type)!r}", param=f"{where}.type")
        if part.text is None:
            raise InvalidRequest("a part of type 'text' has a text", param=f"{where}.text")
        texts.append({"type": "text", "text": part.text})
    return texts


def _call(call: Called, at: str) -> dict[str, Any]:
    # Some clients send an empty string for a call without arguments.
    arguments = _object(call.function.arguments.encode("utf-8", "surrogatepass") or b"{}", f"{at}.arguments")
    read: dict[str, Any] = {"type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
    return read if call.id is None else {"id": call.id, **read}


def _tool(tool: Tool, at: str) -> dict[str, Any]:
    function = tool.function
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    if (schema := bytes(function.parameters)) != bytes(ABSENT):
        described["parameters"] = _object(schema, f"{at}.parameters")
    if function.strict is not None:
        described["strict"] = function.strict
    return {"type": tool.type, "function": described}


def _object(data: bytes, param: str) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequest, naming `param`."""
    if exceeds_depth(data, SCHEMA_DEPTH):
        raise InvalidRequest(f"{param} is nested more than {SCHEMA_DEPTH} levels deep", param=param)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not a JSON object: {shorten(str(error))}", param=param) from None
