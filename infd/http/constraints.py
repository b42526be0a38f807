"""Convert the request fields that constrain the generated text to a `Constraint`.

The fields are OpenAI's and other servers'; a request may set at most one constraint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw, Struct

from infd.constraint import Choice, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag, ToolSchema
from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http.sampling import refuse_unsupported
from infd.http.schema.tools import ToolChoice
from infd.http.schema.unsupported import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.constraint import Plain
    from infd.http.conversation import ToolSpec
    from infd.http.schema.constraints import ResponseFormat, StructuredOutputs
    from infd.http.schema.openai import OpenAIRequest

# Fields of a response_format, by its type.
_FORMAT_FIELDS: Final = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "format"),
}
_ANY_ARGUMENTS: Final = '{"type": "object"}'
_NO_ARGUMENTS: Final = '{"type": "object", "properties": {}, "additionalProperties": false}'


class Constrained(Struct, frozen=True):
    """A constraint, and the request field that sets it, for error messages.

    beside_calls  whether a request that requires tool calls may set the field: OpenAI's response_format constrains
                  only messages without calls
    """

    constraint: Plain
    param: str
    beside_calls: bool = False


def constrained(request: OpenAIRequest) -> Constrained | None:
    """Return the constraint of a request's answers; None: unconstrained. Raises InvalidRequest, Unsupported."""
    return sole(list(_constraints(request)))


def sole(found: Sequence[Constrained]) -> Constrained | None:
    """Return a request's one constraint; None if it has none. Raises InvalidRequest if it has several."""
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidRequest(f"{first} and {second} each constrain the answer: send one of them", param=second)
    return found[0] if found else None


class ConstrainedCalls(Struct, frozen=True):
    """The constraint of a request's tool calls.

    tools     the tools that may be called, with the schemas of their arguments
    required  whether an answer must consist of calls only
    parallel  whether an answer may contain several calls
    param     request field that constrains the calls, for error messages
    """

    tools: tuple[ToolSchema, ...]
    required: bool
    parallel: bool
    param: str


class CallChoice(Struct, frozen=True):
    """A request's fields about the choice of tool calls, in a form common to all APIs.

    required  whether an answer must consist of calls only
    names     the only tools that may be called; None: all tools
    param     request field of the names, for error messages
    parallel  whether an answer may contain several calls
    """

    required: bool = False
    names: tuple[str, ...] | None = None
    param: str = "tool_choice"
    parallel: bool = True


def call_choice(choice: str | ToolChoice | None, parallel: bool | None) -> CallChoice:
    """Convert a chat request's tool_choice and parallel_tool_calls. Raises InvalidRequest, Unsupported."""
    if not isinstance(choice, ToolChoice):
        return CallChoice(choice == "required", parallel=parallel is not False)
    parallel_calls = parallel is not False
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise InvalidRequest("tool_choice of type allowed_tools needs allowed_tools", param="tool_choice")
        names = tuple(_chosen(tool, "tool_choice.allowed_tools.tools") for tool in choice.allowed_tools.tools)
        required = choice.allowed_tools.mode == "required"
        return CallChoice(required, names, "tool_choice.allowed_tools.tools", parallel_calls)
    # If tool_choice names a tool, OpenAI's API answers with one call.
    return CallChoice(True, (_chosen(choice, "tool_choice"),), f"tool_choice.{choice.type}.name", parallel=False)


def _chosen(choice: ToolChoice, param: str) -> str:
    """Return the name of the tool that a tool_choice names. Raises InvalidRequest, Unsupported."""
    if choice.type not in ("function", "custom"):
        raise Unsupported(f"tool_choice of type {shorten(choice.type)!r}", param=f"{param}.type")
    chosen = choice.function if choice.type == "function" else choice.custom
    if chosen is None:
        raise InvalidRequest(
            f"tool_choice of type {choice.type} needs {choice.type}.name", param=f"{param}.{choice.type}"
        )
    return chosen.name


def constrained_calls(
    tools: Sequence[ToolSpec], choice: CallChoice, answer: Constrained | None
) -> ConstrainedCalls | None:
    """Return the constraint of a request's calls; None: unconstrained.

    Calls are constrained if `choice` requires them or names tools, if a tool is strict, or if `answer` is set.

    tools   the tools that may be called
    answer  the constraint of an answer without calls

    Raises InvalidRequest.
    """
    if not tools:
        return None
    required, field = choice.required, choice.param.partition(".")[0]
    if required and answer is not None and not answer.beside_calls:
        raise InvalidRequest(
            f"{field} and {answer.param} each constrain the answer: send one of them",
            param=answer.param,
        )
    if choice.names is not None:
        tools = _named(choice.names, choice.param, tools)
    strict = [tool.schema_param if tool.lark else f"{tool.param}.strict" for tool in tools if tool.strict]
    if required:
        param = field
    elif choice.names is not None:
        param = choice.param
    elif strict:
        param = strict[0]
    elif answer is not None:
        param = answer.param
    else:
        return None
    schemas = tuple(_tool_schema(tool, exact=required) for tool in tools)
    return ConstrainedCalls(schemas, required, choice.parallel, param)


def _named(names: Sequence[str], param: str, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"no tool is named {shorten(name)!r}", param=param)
    return [tool for tool in tools if tool.name in names]


def _tool_schema(tool: ToolSpec, *, exact: bool) -> ToolSchema:
    """Return the schema of a tool's arguments. Not checked to be JSON here: rendering the prompt parses the schema.

    exact  whether the schema is enforced even if the tool is not strict
    """
    if not exact and not tool.strict:
        schema = _ANY_ARGUMENTS
    else:  # as in OpenAI's API, a function without `parameters` has no arguments
        schema = json_text(tool.parameters, tool.schema_param) if is_set(tool.parameters) else _NO_ARGUMENTS
    return ToolSchema(tool.name, schema, tool.schema_param, tool.lark)


def _constraints(request: OpenAIRequest) -> Iterator[Constrained]:
    if request.response_format is not None:
        yield from _response_format(request.response_format)
    if request.structured_outputs is not None:
        yield from structured(request.structured_outputs)
    for name in ("guided_json", "json_schema"):
        if is_set(value := getattr(request, name)):
            yield Constrained(JsonSchema(json_text(value, name)), name)
    if is_set(request.structural_tag):
        description = json_text(request.structural_tag, "structural_tag")
        yield Constrained(StructuralTag(description), "structural_tag")
    for name in ("guided_regex", "regex"):
        if (pattern := getattr(request, name)) is not None:
            yield Constrained(Regex(pattern), name)
    if request.guided_choice is not None:
        yield Constrained(Choice(tuple(request.guided_choice)), "guided_choice")
    for name in ("guided_grammar", "grammar", "ebnf"):
        if (text := getattr(request, name)) is not None:
            yield Constrained(_grammar(text), name)


def _response_format(format: ResponseFormat) -> Iterator[Constrained]:
    _check_fields(format)
    match format.type:
        case "json_object" if is_set(format.schema):
            yield Constrained(
                JsonSchema(json_text(format.schema, "response_format.schema")), "response_format.schema", True
            )
        case "json_object":
            yield Constrained(JsonObject(), "response_format", True)
        case "json_schema":
            param = "response_format.json_schema"
            if format.json_schema is None or not is_set(format.json_schema.schema):
                raise InvalidRequest("response_format of type json_schema needs json_schema.schema", param=param)
            param += ".schema"
            yield Constrained(JsonSchema(json_text(format.json_schema.schema, param)), param, True)
        case "structural_tag":
            parts = {name: getattr(format, name) for name in ("structures", "triggers", "format")}
            description = msgspec.json.encode({name: part for name, part in parts.items() if is_set(part)})
            yield Constrained(StructuralTag(json_text(Raw(description), "response_format")), "response_format", True)


def _check_fields(format: ResponseFormat) -> None:
    """Raise InvalidRequest for a field of another type of response_format, because the field would have no effect."""
    for kind, names in _FORMAT_FIELDS.items():
        for name in () if kind == format.type else names:
            value = getattr(format, name)
            if is_set(value) if isinstance(value, Raw) else value is not None:
                raise InvalidRequest(
                    f"response_format.{name} is for type {kind}, not {format.type}", param=f"response_format.{name}"
                )


def structured(outputs: StructuredOutputs) -> Iterator[Constrained]:
    """Yield the constraints of the field `structured_outputs`. Raises InvalidRequest, Unsupported."""
    at = "structured_outputs"
    refuse_unsupported(outputs, outputs.NEUTRAL, supported=outputs.SUPPORTED, path=f"{at}.")
    whitespace = not outputs.disable_any_whitespace
    found = []
    if is_set(outputs.json):
        schema = JsonSchema(json_text(outputs.json, f"{at}.json"), whitespace=whitespace)
        found.append(Constrained(schema, f"{at}.json"))
    if outputs.regex is not None:
        found.append(Constrained(Regex(outputs.regex), f"{at}.regex"))
    if outputs.choice is not None:
        found.append(Constrained(Choice(tuple(outputs.choice)), f"{at}.choice"))
    if outputs.grammar is not None:
        found.append(Constrained(_grammar(outputs.grammar), f"{at}.grammar"))
    if outputs.json_object:
        found.append(Constrained(JsonObject(whitespace=whitespace), f"{at}.json_object"))
    if is_set(outputs.structural_tag):
        description = json_text(outputs.structural_tag, f"{at}.structural_tag")
        found.append(Constrained(StructuralTag(description), f"{at}.structural_tag"))
    if not found:
        raise InvalidRequest(
            "structured_outputs needs one of json, regex, choice, grammar, json_object, structural_tag", param=at
        )
    yield from found


def _grammar(text: str) -> Lark | Ebnf:
    return Ebnf(text) if "::=" in text else Lark(text)


def is_set(value: Raw) -> bool:
    """Return whether a field of any JSON type is present and not null."""
    return value is not ABSENT and bytes(value) != b"null"


def json_text(value: Raw, param: str) -> str:
    """Return the JSON text of a value sent as JSON, or as a string that contains JSON text. Raises InvalidRequest."""
    text = bytes(value)
    try:  # decoding the body skipped the value without checking it
        return msgspec.json.decode(text, type=str) if text.startswith(b'"') else text.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
