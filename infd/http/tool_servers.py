"""Find the MCP servers that a request names, and the tools of theirs that it offers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct

from infd.errors import InvalidRequest, Unsupported, shorten
from infd.http.remote_tools import RemoteTool, RemoteTools
from infd.http.schema.responses import ApprovalFilter, ToolFilter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.http.schema.responses import ResponsesFields, ResponseTool
    from infd.mcp.messages import Tool
    from infd.mcp.servers import Server, Servers

# Fields that are refused: they would send a client's secret to a server, or name a server in a form that is not served.
_REFUSED = ("authorization", "connector_id", "defer_loading", "headers", "tunnel_id")


class Wanted(Struct, frozen=True):
    """A server that a request names.

    position  its index in the request's tools
    given     the request's fields
    """

    position: int
    given: ResponseTool
    server: Server

    @property
    def label(self) -> str:
        label = self.given.server_label
        return label if label is not UNSET else self.server.label

    def offers(self, tool: Tool) -> bool:
        """Return whether the request offers a tool of the server."""
        allowed = self.given.allowed_tools
        if isinstance(allowed, list):
            return tool.name in allowed
        return not isinstance(allowed, ToolFilter) or _meets(tool, allowed)

    def needs_approval(self, tool: Tool) -> bool:
        """Return whether the client approves each call of a tool first; as at OpenAI, unless the request says never."""
        rule = self.given.require_approval
        if not isinstance(rule, ApprovalFilter):
            return rule != "never"
        if rule.never is not None and (rule.never.tool_names is not None or rule.never.read_only is not None):
            return not _meets(tool, rule.never)
        return rule.never is not None or rule.always is None or _meets(tool, rule.always)


def wanted(request: ResponsesFields, servers: Servers) -> list[Wanted]:
    """Return the servers that a request names. Raises InvalidRequest, Unsupported."""
    found: list[Wanted] = []
    for number, tool in enumerate(request.tools or ()):
        if tool.type != "mcp":
            continue
        at = f"tools[{number}]"
        for name in _REFUSED:
            if getattr(tool, name):
                raise Unsupported(f"{name} of an MCP server (its headers are settings of infd)", param=f"{at}.{name}")
        if tool.allowed_callers and tool.allowed_callers != ["direct"]:
            raise Unsupported("allowed_callers other than direct", param=f"{at}.allowed_callers")
        one = Wanted(number, tool, _server(tool, servers, at))
        if any(one.label == other.label for other in found):
            raise InvalidRequest("each MCP server has a label of its own", param=f"{at}.server_label")
        found.append(one)
    return found


def _server(tool: ResponseTool, servers: Servers, at: str) -> Server:
    if tool.server_url:
        if (server := servers.by_url(tool.server_url)) is None:
            raise InvalidRequest(
                "this MCP server is not among the settings of infd (mcp.servers), which calls no other: its operator"
                " may add it, or leave server_url out and name a server by its server_label",
                param=f"{at}.server_url",
            )
        return server
    if tool.server_label is UNSET:
        raise InvalidRequest("an MCP server has a server_label", param=f"{at}.server_label")
    if (server := servers.by_label(tool.server_label)) is None:
        known = f"known: {', '.join(servers.labels)}" if servers.labels else "none is set up (mcp.servers)"
        raise InvalidRequest(
            f"there is no MCP server {shorten(tool.server_label)!r} here; {known}", param=f"{at}.server_label"
        )
    return server


async def remote_tools(request: ResponsesFields, servers: Servers) -> RemoteTools:
    """Return the tools of the servers that a request names. Raises InvalidRequest, Unsupported, ToolServerFailed."""
    found = wanted(request, servers)
    return offered(found, await asyncio.gather(*(servers.tools(one.server) for one in found)), request)


def offered(found: Sequence[Wanted], lists: Sequence[Sequence[Tool]], request: ResponsesFields) -> RemoteTools:
    """Return the tools that a request offers, given the tools of each server that it names."""
    names = {tool.name for tool in request.tools or () if tool.name is not None}
    tools_offered: list[RemoteTool] = []
    for one, tools in zip(found, lists, strict=True):
        for tool in filter(one.offers, tools):
            name = _unique(one.label, tool.name, names)
            names.add(name)
            tools_offered.append(
                RemoteTool(
                    name=name,
                    label=one.label,
                    position=one.position,
                    tool=tool,
                    approval=one.needs_approval(tool),
                    preface=one.given.server_description or None,
                )
            )
    return RemoteTools(tools_offered)


def _unique(label: str, name: str, names: set[str]) -> str:
    """Return a name for a tool that no tool of the request has; the tool's own if it is free."""
    if name not in names:
        return name
    name, number = f"{label}_{name}", 2
    while name in names:
        name, number = f"{name}_{number}", number + 1
    return name


def _meets(tool: Tool, filter: ToolFilter) -> bool:
    named = filter.tool_names is None or tool.name in filter.tool_names
    return named and (filter.read_only is None or tool.read_only == filter.read_only)
