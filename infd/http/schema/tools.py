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


class Tool(Struct, kw_only=True):
    """A tool. Only tools of type "function" are supported."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Struct, kw_only=True):
    """The name of the function in a ToolChoice."""

    name: str


class ToolChoice(Struct, kw_only=True):
    """A tool_choice that names one tool to call."""

    type: str
    function: ChosenFunction | None = None


class CalledFunction(Struct, kw_only=True):
    """The function of a call in a request. `arguments` is JSON text."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class Called(Struct, kw_only=True):
    """A tool call of an earlier answer, sent back by the client."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ReplyFunction(Struct, kw_only=True):
    """The function of a call in an answer. `arguments` is the model's text, unchecked."""

    name: str
    arguments: str


class ReplyCall(Struct, kw_only=True):
    """One tool call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


class FunctionDelta(Struct, kw_only=True):
    """The new part of a call's function. One delta of a call sets `name`; every delta sets a part of `arguments`."""

    name: str | UnsetType = UNSET
    arguments: str


class ReplyCallDelta(Struct, kw_only=True):
    """The new part of a tool call in a streamed answer. One delta of a call sets `id` and `type`."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
