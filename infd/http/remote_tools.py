"""The tools of MCP servers that a request offers besides its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.http.conversation import ToolSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.mcp.messages import Tool


class RemoteTool(Struct, frozen=True, kw_only=True):
    """A tool of an MCP server, as a request offers it.

    name      name by which the model calls the tool; unique in the request
    label     the request's label of the server
    position  index of the server in the request's tools
    approval  whether the client approves each call first
    preface   text before the tool's description, from the request; None: none
    """

    name: str
    label: str
    position: int
    tool: Tool
    approval: bool
    preface: str | None = None

    @property
    def spec(self) -> ToolSpec:
        tool = self.tool
        described = "\n".join(filter(None, (self.preface, tool.description))) or None
        return ToolSpec(self.name, described, tool.input_schema, None, f"tools[{self.position}]", "input_schema")


class RemoteTools:
    """All tools of MCP servers that a request offers."""

    def __init__(self, tools: Iterable[RemoteTool] = ()) -> None:
        self._by_name = {tool.name: tool for tool in tools}
        self._by_place = {(tool.label, tool.tool.name): tool for tool in self._by_name.values()}

    def called(self, name: str) -> RemoteTool | None:
        """Return the tool that the model calls by `name`; None: it is the client's."""
        return self._by_name.get(name)

    def find(self, label: str | None, name: str | None) -> RemoteTool | None:
        """Return a server's tool; None: it is not offered."""
        return self._by_place.get((label or "", name or ""))

    def at(self, position: int) -> Sequence[RemoteTool]:
        """Return the tools of the server with this index in the request's tools."""
        return [tool for tool in self._by_name.values() if tool.position == position]

    def names(self, label: str | None, name: str | None) -> tuple[str, ...]:
        """Return the names by which the model calls a server's tool, or without `name` all tools of the server."""
        return tuple(
            tool.name for tool in self._by_name.values() if tool.label == label and name in (None, tool.tool.name)
        )


NO_REMOTE_TOOLS = RemoteTools()
