"""The tools of a chat request, and tool calls in requests and answers."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from infd.http.schema.unsupported import ABSENT

# Maximum tools in a request and calls in a message. OpenAI accepts 128 tools; infd accepts more, because other limits
# bound the cost of rendering.
TOOLS: Final = 512
CALLS: Final = 512
# Maximum nesting of a tool's JSON schema and of a call's arguments.
SCHEMA_DEPTH: Final = 64

# infd permits more characters than OpenAI does, because MCP clients prefix tool names with server names.
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}\Z")]
CallId = Annotated[str, Meta(max_length=256)]


class Function(Struct, kw_only=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class InputGrammar(Struct, kw_only=True):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


class InputFormat(Struct, kw_only=True):
    """The format of a custom tool's input: any text, or text that a grammar derives."""

    type: Literal["text", "grammar"] = "text"
    grammar: InputGrammar | None = None


class Custom(Struct, kw_only=True):
    """A tool that is called with a text instead of JSON."""

    name: ToolName
    description: str | None = None
    format: InputFormat | None = None


class FunctionTool(Struct, kw_only=True, tag_field="type", tag="function"):
    """A tool that is called with arguments."""

    function: Function


class CustomTool(Struct, kw_only=True, tag_field="type", tag="custom"):
    """A tool that is called with a text."""

    custom: Custom


Tool = FunctionTool | CustomTool


class ChosenFunction(Struct, kw_only=True):
    """The name of the tool in a ToolChoice."""

    name: str


class AllowedTools(Struct, kw_only=True):
    """The only tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Meta(min_length=1, max_length=TOOLS)]


class ToolChoice(Struct, kw_only=True):
    """A tool_choice that names one tool to call, or with type "allowed_tools" the only tools that may be called."""

    type: str
    function: ChosenFunction | None = None
    custom: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class CalledCustom(Struct, kw_only=True):
    """The custom tool of a call in a request."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str


class CalledFunction(Struct, kw_only=True):
    """The function of a call in a request. `arguments` is JSON text."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class Called(Struct, kw_only=True):
    """A tool call of an earlier answer, sent back by the client."""

    id: CallId | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ReplyFunction(Struct, kw_only=True):
    """The function of a call in an answer. `arguments` is the model's text, unchecked."""

    name: str
    arguments: str


class ReplyCustom(Struct, kw_only=True):
    """The custom tool of a call in an answer."""

    name: str
    input: str


class ReplyCall(Struct, kw_only=True):
    """One tool call in an answer: of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: ReplyFunction | UnsetType = UNSET
    custom: ReplyCustom | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    """The new part of a call's function. One delta of a call sets `name`; every delta sets a part of `arguments`."""

    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(Struct, kw_only=True):
    """The new part of a custom tool's call. One delta of a call sets `name`; every delta sets a part of `input`."""

    name: str | UnsetType = UNSET
    input: str


class ReplyCallDelta(Struct, kw_only=True):
    """The new part of a tool call in a streamed answer. One delta of a call sets `id` and `type`."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET
