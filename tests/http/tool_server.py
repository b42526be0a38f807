"""An MCP server in the test's process, that can misbehave."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

INTEGERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


class ToolServer:
    """Answers as the protocol says, unless `misbehave` returns a response for a method.

    events  whether answers are streams of events
    """

    def __init__(self) -> None:
        self.events = False
        self.tools: dict[str, Callable[..., Any]] = {"multiply": lambda a, b: a * b}
        self.annotations: dict[str, Any] = {}
        self.misbehave: Callable[[str, web.Request], Any] = lambda method, request: None
        self.heard: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.sessions = 0
        self.waiting = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if request.method == "DELETE":
            self.heard.append("DELETE")
            self.sessions -= 1
            return web.Response()
        message = await request.json()
        method = message.get("method", "reply")
        self.heard.append(method)
        if (answer := self.misbehave(method, request)) is not None:
            return await answer if asyncio.iscoroutine(answer) else answer
        if "id" not in message or "method" not in message:
            return web.Response(status=202)
        result = await self.result(method, message.get("params", {}))
        answered = json.dumps({"jsonrpc": "2.0", "id": message["id"], **result})
        headers = {}
        if method == "initialize":
            self.sessions += 1
            headers["Mcp-Session-Id"] = f"s{self.sessions}"
        if not self.events:
            return web.Response(text=answered, content_type="application/json", headers=headers)
        notice = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
        text = f": hello\r\n\r\nevent: message\r\ndata: {notice}\r\n\r\nid: 7\r\ndata: {answered}\r\n\r\n"
        return web.Response(text=text, content_type="text/event-stream", headers=headers)

    async def result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            return {"result": {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}}
        if method == "tools/list":
            tools = [
                {"name": name, "inputSchema": INTEGERS, **({"annotations": hints} if hints else {})}
                for name in self.tools
                for hints in [self.annotations.get(name)]
            ]
            return {"result": {"tools": tools}}
        try:
            value = self.tools[params["name"]](**params["arguments"])
            if asyncio.iscoroutine(value):
                value = await value
        except Exception as error:
            return {"result": {"content": [{"type": "text", "text": str(error)}], "isError": True}}
        return {"result": {"content": [{"type": "text", "text": str(value)}]}}


@asynccontextmanager
async def tool_server() -> AsyncIterator[ToolServer]:
    server = ToolServer()
    app = web.Application()
    app.router.add_route("*", "/mcp", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = "http://{}:{}/mcp".format(*runner.addresses[0][:2])
    try:
        yield server
    finally:
        server.waiting.set()
        await runner.cleanup()
