"""The messages of the Model Context Protocol that a client of tools sends and reads: JSON-RPC 2.0.

Source: the protocol's revisions 2025-03-26 to 2025-11-25, which have one form of these messages.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct, field

from infd.errors import ToolServerFailed
from infd.version import __version__

# Revisions that begin with `initialize`, the newest first. A server answers with the revision that it speaks.
REVISIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
METHOD_NOT_FOUND: Final = -32601
MISSING_SCHEMA: Final = Raw(b'{"type":"object"}')


class Tool(Struct, frozen=True, rename="camel"):
    """A tool of a server.

    input_schema  JSON schema of the arguments
    annotations   hints of the server about the tool, as JSON; null: none
    """

    name: str
    description: str | None = None
    input_schema: Raw = MISSING_SCHEMA
    annotations: Raw = Raw(b"null")

    @property
    def is_sound(self) -> bool:
        """Whether the schema is a JSON object."""
        try:
            return isinstance(msgspec.json.decode(self.input_schema), dict)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False

    @property
    def read_only(self) -> bool:
        """Whether the server states that the tool changes nothing."""
        try:
            return msgspec.json.decode(self.annotations, type=_Hints | None) == _Hints(True)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False


class _Hints(Struct, frozen=True, rename="camel"):
    read_only_hint: bool | None = None


class ToolPage(Struct, frozen=True, rename="camel"):
    """The result of tools/list. `next_cursor`: more tools follow; None: these are the last."""

    tools: list[Tool]
    next_cursor: str | None = None


class Initialized(Struct, frozen=True, rename="camel"):
    """The result of initialize."""

    protocol_version: str


class _Resource(Struct, frozen=True):
    uri: str = ""
    text: str | None = None


class _Content(Struct, frozen=True, rename="camel"):
    type: str
    text: str | None = None
    resource: _Resource | None = None
    uri: str | None = None
    mime_type: str | None = None


class CallResult(Struct, frozen=True, rename="camel"):
    """The result of tools/call. `is_error`: the tool itself failed, and the content says why."""

    content: list[_Content] = []
    structured_content: Raw = Raw(b"null")
    is_error: bool = False

    @property
    def text(self) -> str:
        """The content as text; content of other kinds is named, and its data omitted."""
        if not self.content and bytes(self.structured_content) != b"null":
            return bytes(self.structured_content).decode("utf-8", "replace")
        return "\n".join(map(_text, self.content))


def _text(content: _Content) -> str:
    if content.text is not None:
        return content.text
    if (resource := content.resource) is not None:
        return resource.text if resource.text is not None else f"[resource {resource.uri}]"
    return f"[{content.type} {content.uri or content.mime_type or ''}]"


class RpcError(Struct, frozen=True):
    code: int
    message: str = ""


class Message(Struct, frozen=True):
    """A message from a server: the answer to a request of ours, a request, or a notification.

    id  id of the request; null for notifications
    """

    id: Raw = Raw(b"null")
    method: str | None = None
    result: Raw = Raw(b"null")
    error: RpcError | None = None


class Request(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A request of ours; without `id` a notification."""

    jsonrpc: str = field(default_factory=lambda: "2.0")  # a factory's value is encoded although it is the default
    id: int | None = None
    method: str
    params: Any = None


def initialize(id: int) -> Request:
    client = {"name": "infd", "version": __version__}
    params = {"protocolVersion": REVISIONS[0], "capabilities": {}, "clientInfo": client}
    return Request(id=id, method="initialize", params=params)


def list_tools(id: int, cursor: str | None) -> Request:
    return Request(id=id, method="tools/list", params={} if cursor is None else {"cursor": cursor})


def call_tool(id: int, name: str, arguments: dict[str, Any]) -> Request:
    return Request(id=id, method="tools/call", params={"name": name, "arguments": arguments})


INITIALIZED: Final = Request(method="notifications/initialized")


def reply(message: Message) -> bytes:
    """Return the answer to a server's request: an empty result for a ping; any other method is unknown here."""
    head = {"jsonrpc": "2.0", "id": message.id}
    if message.method == "ping":
        return msgspec.json.encode({**head, "result": {}})
    error = {"code": METHOD_NOT_FOUND, "message": "this client only calls tools"}
    return msgspec.json.encode({**head, "error": error})


def message(data: bytes) -> Message:
    """Decode a message. Raises ToolServerFailed."""
    found: Message = _decode(data, Message, "message")
    return found


def result(message: Message, type_: Any) -> Any:
    """Return the result of an answer, decoded as `type_`. Raises ToolServerFailed."""
    if message.error is not None:
        raise ToolServerFailed(message.error.message, kind="mcp_protocol_error", number=message.error.code)
    return _decode(bytes(message.result), type_, "result")


def _decode(data: bytes, type_: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ToolServerFailed(f"the {name} is malformed: {error}", kind="mcp_protocol_error", number=-32700) from None
