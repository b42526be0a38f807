"""Tools that a chat may call, and the calls."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from infd.http.schema.sampling import ABSENT

# OpenAI accepts 128. Rendering many tools is bounded by the limits on templates.
TOOLS: Final = 512
CALLS: Final = 512
# Nesting of the parameters' JSON schema and of a call's arguments.
SCHEMA_DEPTH: Final = 64

# Wider than OpenAI's: MCP servers prefix their own name to the tool's.
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}\Z")]
CallId = Annotated[str, Meta(max_length=256)]


class Function(Struct, kw_only=True):
    """A function that can be called. `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool. Only functions are served."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Struct, kw_only=True):
    """A function by name."""

    name: str


class ToolChoice(Struct, kw_only=True):
    """One tool that must be called."""

    type: str
    function: ChosenFunction | None = None


class CalledFunction(Struct, kw_only=True):
    """The function that was called. `arguments` is JSON text."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str


class Called(Struct, kw_only=True):
    """A call that the assistant made, as a client sends it back."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ReplyFunction(Struct, kw_only=True):
    """A function that the answer calls, with the arguments as the model wrote them."""

    name: str
    arguments: str


class ReplyCall(Struct, kw_only=True):
    """One call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


class FunctionDelta(Struct, kw_only=True):
    """The new part of a call: its name once, its arguments in parts."""

    name: str | UnsetType = UNSET
    arguments: str


class ReplyCallDelta(Struct, kw_only=True):
    """The new part of a call in a streamed answer. Id, type and name come once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
