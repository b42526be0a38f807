"""Tools of an MCP server written with the protocol's official package, called for clients of OpenAI's packages."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.config import Config, McpConfig
from infd.errors import ToolServerFailed
from infd.mcp.servers import Servers
from tests.e2e.process import Daemon
from tests.http.scripted import speaking
from tests.http.test_rounds import MULTIPLY, RoundsDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]  # of the packages' libraries

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
mcpserver = pytest.importorskip("mcp.server.mcpserver", reason="`make test-all` installs it")

NEVER: Any = {"type": "mcp", "server_label": "maths", "require_approval": "never"}


def official(**options: Any) -> Any:
    """Return the application of a server with three tools."""
    server = mcpserver.MCPServer("maths")

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiply two integers"""
        return a * b

    @server.tool()
    async def report(steps: int, ctx: mcpserver.Context) -> str:
        """Report progress, then answer"""
        for step in range(steps):
            await ctx.report_progress(step, steps)
        return "reported"

    @server.tool()
    def fail() -> str:
        """Fail"""
        raise ValueError("as asked")

    return server.streamable_http_app(**options)


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    server.capture_signals = _no_signals
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield "http://{}:{}/mcp".format(*listening.getsockname())
    finally:
        server.should_exit = True
        await task


def _no_signals() -> Any:
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize("options", [{}, {"json_response": True}, {"stateless_http": True}], ids=str)
async def test_the_official_servers_tools_are_listed_and_called(options: dict[str, Any]):
    async with running(official(**options)) as url:
        servers = Servers(McpConfig(servers={"maths": url}), {})
        server = servers.by_label("maths")
        assert server is not None
        assert [tool.name for tool in await servers.tools(server)] == ["multiply", "report", "fail"]
        async with servers.calls() as calls:
            first, second, third = await asyncio.gather(
                calls.call(server, "multiply", {"a": 123, "b": 456}),
                calls.call(server, "report", {"steps": 3}),
                calls.call(server, "fail", {}),
            )
            assert (first.text, second.text, third.is_error) == ("56088", "reported", True)
            assert "fail" in third.text
        await servers.close()


async def test_a_server_that_is_not_there_fails_by_name():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = "http://{}:{}/mcp".format(*closed.getsockname())
    servers = Servers(McpConfig(servers={"maths": url}), {})
    server = servers.by_label("maths")
    assert server is not None
    with pytest.raises(ToolServerFailed, match="not reached"):
        await servers.tools(server)
    await servers.close()


@asynccontextmanager
async def client_of(*answers: str) -> AsyncIterator[Any]:
    async with running(official()) as url:
        config = msgspec.convert({"mcp": {"servers": {"maths": url}}}, Config)
        async with speaking(*answers, config=config) as endpoint:
            device = endpoint.executor.device = RoundsDevice(endpoint.executor.device.capacity)
            device.answers, device.prompted = answers, []
            async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="k", max_retries=0) as client:
                yield client


def valid(read: Any) -> Any:
    type(read).model_validate(read.to_dict(mode="json"))
    return read


def said(response: Any) -> Any:
    fields = valid(response).to_dict(mode="json")
    for item in fields["output"]:
        item.pop("id")
        for part in item.get("content") or ():
            part.pop("parsed", None)
    del fields["usage"]["input_tokens_details"]
    return {name: value for name, value in fields.items() if name not in ("id", "created_at", "completed_at")}


async def test_openais_package_reads_every_item_and_event():
    asked: dict[str, Any] = {"model": "alias", "input": "123 x 456?", "tools": [NEVER], "extra_body": {"seed": 0}}
    async with client_of(MULTIPLY, "It is 56,088.") as client:
        whole = await client.responses.create(**asked)
        kinds = [event.type async for event in await client.responses.create(**asked, stream=True) if valid(event)]
        async with client.responses.stream(**asked) as stream:
            folded = await stream.get_final_response()
        assert said(folded) == said(whole)
        listed, call, _ = whole.output
        assert {tool.name for tool in listed.tools} == {"multiply", "report", "fail"}
        assert (call.type, call.name, call.output, call.status) == ("mcp_call", "multiply", "56088", "completed")
        assert whole.output_text == "It is 56,088."
        assert {kind for kind in kinds if "mcp" in kind} == {
            f"response.{kind}"
            for kind in (
                "mcp_list_tools.in_progress",
                "mcp_list_tools.completed",
                "mcp_call.in_progress",
                "mcp_call_arguments.delta",
                "mcp_call_arguments.done",
                "mcp_call.completed",
            )
        }
        items = await client.responses.input_items.list(whole.id)
        assert [item.type for item in items.data] == ["message"]


async def test_an_approval_by_openais_package():
    asking = {name: value for name, value in NEVER.items() if name != "require_approval"}
    asked: dict[str, Any] = {"model": "alias", "tools": [asking], "extra_body": {"seed": 0}}
    async with client_of(MULTIPLY, "It is 56,088.") as client:
        first = valid(await client.responses.create(input="123 x 456?", **asked))
        request = first.output[-1]
        assert (request.type, json.loads(request.arguments)) == ("mcp_approval_request", {"a": 123, "b": 456})
        yes = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
        second = valid(await client.responses.create(input=[yes], previous_response_id=first.id, **asked))
        assert (second.output[0].output, second.output[0].approval_request_id) == ("56088", request.id)
        assert second.output_text == "It is 56,088."


@pytest.mark.parametrize("drain_s", [60, 0.2])
async def test_a_daemon_that_is_stopped_waits_for_a_slow_server(tmp_path: Path, drain_s: float):
    called, answer = asyncio.Event(), asyncio.Event()
    server = mcpserver.MCPServer("maths")

    @server.tool()
    async def slow() -> str:
        called.set()
        await answer.wait()
        return "at last"

    items = [
        {"type": "message", "role": "user", "content": "Wait."},
        {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "maths", "name": "slow", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    ]
    tool = {"type": "mcp", "server_label": "maths"}
    async with running(server.streamable_http_app()) as url:
        settings = ["--mcp-server", f"maths={url}", "--set", f"server.drain_timeout_s={drain_s}"]
        daemon = await asyncio.to_thread(Daemon, tmp_path, settings, {})
        try:
            await asyncio.to_thread(daemon.ready)
            async with openai.AsyncOpenAI(base_url="http://{}:{}/v1".format(*daemon.address), api_key="k") as client:
                stream = await client.responses.create(
                    model="embedded", input=items, tools=[tool], max_output_tokens=5, stream=True
                )
                reading = asyncio.create_task(_read(stream))
                await called.wait()
                daemon.signal(signal.SIGTERM)
                if drain_s > 1:
                    await asyncio.to_thread(daemon.wait_for, "STOPPING", "1")
                    answer.set()
                *_, last = await reading
                answer.set()
            assert await asyncio.to_thread(daemon.exit_code) == (0 if drain_s > 1 else 75)
        finally:
            answer.set()
            await asyncio.to_thread(daemon.close)
    call = last.response.output[1]
    if drain_s > 1:
        assert last.type in ("response.completed", "response.incomplete")
        assert (call.output, call.status) == ("at last", "completed")
        assert len(last.response.output) > 2
    else:
        assert (last.type, last.response.error.code) == ("response.failed", "draining")


async def _read(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_openai_agents_hosted_tool(monkeypatch: pytest.MonkeyPatch):
    agents = pytest.importorskip("agents", reason="`make test-all` installs it")
    agents.set_tracing_disabled(True)
    async with client_of(MULTIPLY, "It is 56,088.") as client:
        model = agents.OpenAIResponsesModel("alias", client)
        settings = agents.ModelSettings(extra_body={"seed": 0})
        agent = agents.Agent("maths", model=model, tools=[agents.HostedMCPTool(NEVER)], model_settings=settings)
        result = await agents.Runner.run(agent, "123 x 456?")
        assert int(result.final_output.removeprefix("It is ").rstrip(".").replace(",", "")) == 56088
