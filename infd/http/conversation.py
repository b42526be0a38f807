"""Convert the messages and tools of a chat request to the form that chat templates expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http.json_body import exceeds_depth
from infd.http.sampling import refuse_unsupported
from infd.http.schema.tools import SCHEMA_DEPTH, FunctionTool
from infd.http.schema.unsupported import ABSENT
from infd.text.tools.offered import Offered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.http.schema.chat import Message
    from infd.http.schema.tools import Called, CalledFunction, Function, Tool

# Roles of OpenAI's API that most chat templates do not know, and the roles that replace them.
ROLES: Final = {"developer": "system", "function": "tool"}


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as dicts for a chat template. Raises InvalidRequest, Unsupported, naming the message."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


class ToolSpec(Struct, frozen=True):
    """A function that the model may call, in a form common to all APIs.

    parameters   JSON schema of the arguments
    param        request field of the function, for error messages
    schema_name  name of the schema's field in `param`
    lark         Lark grammar of a custom tool's input; empty: none
    """

    name: str
    description: str | None
    parameters: Raw
    strict: bool | None
    param: str
    schema_name: str = "parameters"
    lark: str = ""

    @property
    def schema_param(self) -> str:
        return f"{self.param}.{self.schema_name}"


def tool_specs(tools: Sequence[Tool]) -> list[ToolSpec]:
    """Return a chat request's tools. Raises InvalidRequest, naming the tool."""
    return [_tool(number, tool) for number, tool in enumerate(tools)]


def custom_spec(
    name: str, description: str | None, grammar: tuple[str, str] | None, param: str, format_name: str
) -> ToolSpec:
    """Return a custom tool: a function whose only argument is the string `input`.

    grammar      syntax ("lark" or "regex") and definition of the input's grammar, which is enforced; None: any text
    format_name  name of the grammar's field in `param`
    """
    value: dict[str, Any] = {"type": "string"}
    lark = ""
    match grammar:
        case "regex", pattern:
            value["pattern"] = f"^(?:{pattern})$"
        case "lark", lark:
            value["description"] = f"a text of this grammar in Lark:\n{lark}"
    schema = {"type": "object", "properties": {"input": value}, "required": ["input"], "additionalProperties": False}
    strict = None if grammar is None else True
    return ToolSpec(name, description, Raw(msgspec.json.encode(schema)), strict, param, format_name, lark)


def function_specs(functions: Sequence[Function]) -> list[ToolSpec]:
    """Return the functions of a chat request that sends `functions` instead of `tools`."""
    return [_tool_spec(function, f"functions[{number}]") for number, function in enumerate(functions)]


def template_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools as dicts for a chat template. The order of keys is fixed, so that equal tools render equally.

    Raises InvalidRequest, naming the tool.
    """
    return [_described(tool) for tool in tools]


def template_documents(documents: Sequence[Raw]) -> list[dict[str, Any]]:
    """Return the documents as dicts for a chat template. Raises InvalidRequest, naming the document."""
    return [json_dict(bytes(document), f"documents[{number}]") for number, document in enumerate(documents)]


def offered_tools(tools: Sequence[ToolSpec]) -> Offered:
    """Return the tools that an answer may call."""
    schemas = ((tool.name, bytes(tool.parameters)) for tool in tools)
    return Offered({name: b"" if schema == bytes(ABSENT) else schema for name, schema in schemas})


def final_text(messages: Sequence[Message]) -> str:
    """Return the text of the final message."""
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def _tool(number: int, tool: Tool) -> ToolSpec:
    if isinstance(tool, FunctionTool):
        return _tool_spec(tool.function, f"tools[{number}].function")
    custom, param = tool.custom, f"tools[{number}].custom"
    grammar = None
    if (format := custom.format) is not None and format.type == "grammar":
        if format.grammar is None:
            raise InvalidRequest("a format of type grammar has a grammar", param=f"{param}.format.grammar")
        grammar = format.grammar.syntax, format.grammar.definition
    return custom_spec(custom.name, custom.description, grammar, param, "format.grammar.definition")


def _tool_spec(function: Function, param: str) -> ToolSpec:
    return ToolSpec(function.name, function.description, function.parameters, function.strict, param)


def _message(message: Message, at: str) -> dict[str, Any]:
    refuse_unsupported(message, message.NEUTRAL, path=f"{at}.")
    read: dict[str, Any] = {"role": ROLES.get(message.role, message.role)}
    calls = list(_calls(message, at))
    if calls and message.role != "assistant":
        raise InvalidRequest("only the assistant calls tools", param=f"{at}.tool_calls")
    if message.content is not None:
        read["content"] = _content(message, at)
    elif not calls:
        raise InvalidRequest("content is required", param=f"{at}.content")
    if message.name is not None:
        read["name"] = message.name
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        read["reasoning_content"] = reasoning
    if calls:
        read["tool_calls"] = calls
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


def _calls(message: Message, at: str) -> Iterator[dict[str, Any]]:
    for number, call in enumerate(message.tool_calls or ()):
        read = {"type": "function", "function": _called_tool(call, f"{at}.tool_calls[{number}]")}
        yield read if call.id is None else {"id": call.id, **read}
    if message.function_call is not None:
        yield {"type": "function", "function": _called(message.function_call, f"{at}.function_call")}


def _called_tool(call: Called, at: str) -> dict[str, Any]:
    if call.type == "function" and call.function is not None:
        return _called(call.function, f"{at}.function")
    if call.type == "custom" and call.custom is not None:
        return {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    raise InvalidRequest(f"a call of type {call.type} has a {call.type}", param=f"{at}.{call.type}")


def _called(function: CalledFunction, at: str) -> dict[str, Any]:
    # Some clients send an empty string for a call without arguments.
    arguments = json_dict(function.arguments.encode("utf-8", "surrogatepass") or b"{}", f"{at}.arguments")
    return {"name": function.name, "arguments": arguments}


def _described(tool: ToolSpec) -> dict[str, Any]:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        described["description"] = tool.description
    if (schema := bytes(tool.parameters)) != bytes(ABSENT):
        described["parameters"] = json_dict(schema, tool.schema_param)
    if tool.strict is not None:
        described["strict"] = tool.strict
    return {"type": "function", "function": described}


def json_dict(data: bytes, param: str) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequest, naming `param`."""
    if exceeds_depth(data, SCHEMA_DEPTH):
        raise InvalidRequest(f"{param} is nested more than {SCHEMA_DEPTH} levels deep", param=param)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not a JSON object: {shorten(str(error))}", param=param) from None
