"""Responses whose model calls tools of MCP servers."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from infd.config import Config, McpConfig
from infd.errors import ConfigError, ServerStopped
from infd.mcp.servers import Servers
from tests.http.model import tokenizer
from tests.http.scripted import ScriptedDevice, ids_of, speaking
from tests.http.test_responses import PATH, TOOLS, asked, get, stripped
from tests.http.tool_server import ToolServer, tool_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from pathlib import Path

    from infd.scheduler.plan import Span
    from tests.http.endpoint import Endpoint

MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 123, "b": 456}}\n</tool_call>'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NEVER: Any = {"type": "mcp", "server_label": "maths", "require_approval": "never"}
ASKING: Any = {"type": "mcp", "server_label": "maths"}


class RoundsDevice(ScriptedDevice):
    """Gives one answer after another: the number of the assistant's messages in the prompt is the answer's index."""

    prompted: list[str]

    def speak(self, span: Span, histories: list[list[int]]) -> int:
        prompt = tokenizer().decode(self.tokens[span.row][: self.prompts[span.row]], skip_special_tokens=False)
        said = span.start + span.count - self.prompts[span.row]
        if not said:
            self.prompted.append(prompt)
        ids = ids_of(self.answers[min(prompt.count("<|im_start|>assistant"), len(self.answers)) - 1])
        return ids[said] if said < len(ids) else tokenizer().id_of("<|im_end|>") or 0


class Conversing:
    """An endpoint, the MCP server that it may use, and the prompts of the model's answers."""

    def __init__(self, endpoint: Endpoint, tools: ToolServer, prompted: list[str]) -> None:
        self.endpoint = endpoint
        self.tools = tools
        self.prompted = prompted

    async def whole(self, status: int = 200, **fields: Any) -> dict[str, Any]:
        got, answer = await self.endpoint.post(PATH, asked(**{"tools": [NEVER], **fields}))
        assert got == status, answer
        return answer

    async def events(self, **fields: Any) -> list[dict[str, Any]]:
        return await self.endpoint.named_events(PATH, asked(**{"tools": [NEVER], **fields}))

    async def calling(self, client: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a client; return it once its call is being made, which ends when `tools.waiting` is set."""
        called = asyncio.Event()

        async def multiply(a: int, b: int) -> int:
            called.set()
            await self.tools.waiting.wait()
            return a * b

        self.tools.tools["multiply"] = multiply
        task = asyncio.create_task(client)
        await called.wait()
        return task

    async def ended(self) -> None:
        """Wait until all sessions have ended."""
        while self.tools.sessions:
            await asyncio.sleep(0.001)

    async def both(self, **fields: Any) -> dict[str, Any]:
        """Request a response whole, streamed and in the background; check that all are equal, and return it."""
        whole = await self.whole(**fields)
        assert plain(folded(await self.events(**fields))) == plain(whole)
        assert await get(self.endpoint, f"{PATH}/{whole['id']}") == whole
        behind = folded(await self.events(**fields, background=True))
        assert plain({**behind, "background": False}) == plain(whole)
        return whole


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without ids and times."""
    found = stripped(response)
    for item in found["output"]:
        if item["type"] == "mcp_call" and item["approval_request_id"] is not None:
            item["approval_request_id"] = "an id"
    return found


@asynccontextmanager
async def conversing(*answers: str, **settings: Any) -> AsyncIterator[Conversing]:
    """Run an endpoint whose model gives these answers in turn, and an MCP server labelled maths."""
    async with tool_server() as tools:
        config = msgspec.convert({"mcp": {"servers": {"maths": tools.url}, **settings}}, Config)
        async with speaking(*answers, config=config) as endpoint:
            old = endpoint.executor.device
            device = endpoint.executor.device = RoundsDevice(old.capacity)
            device.answers, device.prompted = answers, []
            yield Conversing(endpoint, tools, device.prompted)


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response that the events add up to; check their numbers, order and pairs, and the last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, *between, last = events
    assert created["type"] == "response.created"
    between = [event for event in between if event["type"] not in ("response.queued", "response.in_progress")]
    output: list[dict[str, Any]] = []
    done: set[int] = set()
    kinds: dict[int, list[str]] = {}
    texts: dict[tuple[int, str], str] = {}
    for event in between:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        kinds.setdefault(place, []).append(kind)
        if kind == "output_item.added":
            assert place == len(output)
            output.append(event["item"])
        elif kind == "output_item.done":
            assert place not in done
            done.add(place)
            assert {**event["item"], "id": output[place]["id"]} == event["item"]
            output[place] = event["item"]
        else:
            assert event["item_id"] == output[place]["id"]
            name, _, state = kind.rpartition(".")
            if state == "delta":
                texts[place, name] = texts.get((place, name), "") + event["delta"]
            elif state == "done" and "part" not in event:
                assert texts.get((place, name), "") == event.get("text", event.get("arguments"))
    for place, item in enumerate(output):
        if item["type"] == "mcp_call":
            first, second, *arguments, ended, last_kind = kinds[place]
            assert (first, second, last_kind) == ("output_item.added", "mcp_call.in_progress", "output_item.done")
            assert ended == f"mcp_call.{item['status']}"
            assert [kind for kind in arguments if kind != "mcp_call_arguments.delta"] == ["mcp_call_arguments.done"]
        if item["type"] == "mcp_list_tools":
            assert kinds[place] == [
                "output_item.added",
                "mcp_list_tools.in_progress",
                "mcp_list_tools.completed",
                "output_item.done",
            ]
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert done == set(range(len(output)))
    assert output == response["output"]
    return response


async def test_the_models_call_is_made_and_its_number_is_read():
    async with conversing(f"Let me see.\n{MULTIPLY}", "It is 56,088.") as talk:
        response = await talk.both()

        listed, message, call, answer = response["output"]
        assert (listed["type"], listed["server_label"]) == ("mcp_list_tools", "maths")
        assert [tool["name"] for tool in listed["tools"]] == ["multiply"]
        assert message["content"][0]["text"] == "Let me see."
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "mcp_call",
            "multiply",
            {"a": 123, "b": 456},
        )
        assert int(call["output"]) == 123 * 456
        assert int(answer["content"][0]["text"].removeprefix("It is ").rstrip(".").replace(",", "")) == 123 * 456
        first, second = talk.prompted[:2]
        assert '"name": "multiply"' in first
        assert "<tool_response>\n56088\n</tool_response>" in second
        assert response["usage"]["input_tokens"] == sum(len(tokenizer().encode(prompt)) for prompt in (first, second))
        await talk.ended()


async def test_calls_are_made_at_once_and_a_servers_stream_is_read():
    async with conversing(MULTIPLY + "\n" + MULTIPLY.replace("123", "5"), "Done.") as talk:
        talk.tools.events = True
        met = asyncio.Barrier(2)

        async def multiply(a: int, b: int) -> int:
            await met.wait()
            return a * b

        talk.tools.tools["multiply"] = multiply
        response = await talk.both()

        assert [item["output"] for item in response["output"] if item["type"] == "mcp_call"] == ["56088", "2280"]
        assert talk.prompted[1].count("<tool_response>") == 2


async def test_an_approval_is_asked_for_and_the_approved_call_is_made_first():
    async with conversing(MULTIPLY, "It is 56088.", "Fine.") as talk:
        asking = await talk.both(tools=[ASKING])
        *_, wanted = asking["output"]
        assert (wanted["type"], wanted["name"], json.loads(wanted["arguments"])["a"]) == (
            "mcp_approval_request",
            "multiply",
            123,
        )
        assert "tools/call" not in talk.tools.heard

        yes = [{"type": "mcp_approval_response", "approval_request_id": wanted["id"], "approve": True}]
        answered = await talk.both(tools=[ASKING], input=yes, previous_response_id=asking["id"])
        call, message = answered["output"]
        assert (call["type"], call["approval_request_id"], call["output"]) == ("mcp_call", wanted["id"], "56088")
        assert message["content"][0]["text"] == "It is 56088."

        heard = talk.tools.heard.count("tools/call")
        await talk.whole(tools=[ASKING], input="thanks", previous_response_id=answered["id"])
        assert talk.tools.heard.count("tools/call") == heard
        assert talk.prompted[-1].count("<tool_response>") == 1


async def test_of_two_calls_only_the_approved_one_is_made():
    async with conversing(MULTIPLY + "\n" + MULTIPLY, "Done.") as talk:
        asking = await talk.both(tools=[ASKING])
        first, second = (item["id"] for item in asking["output"] if item["type"] == "mcp_approval_request")
        assert first != second

        answers = [
            {"type": "mcp_approval_response", "approval_request_id": first, "approve": True},
            {"type": "mcp_approval_response", "approval_request_id": second, "approve": False},
        ]
        answered = await talk.whole(tools=[ASKING], input=answers, previous_response_id=asking["id"])

        assert [item["approval_request_id"] for item in answered["output"] if item["type"] == "mcp_call"] == [first]
        assert talk.tools.heard.count("tools/call") == 1
        for answer in answers:
            answer["approve"] = True
        body = await talk.whole(
            status=400, tools=[ASKING], input=answers, max_tool_calls=1, previous_response_id=asking["id"]
        )
        assert "2 calls are approved, and one response makes at most 1" in body["error"]["message"]


async def test_a_refused_call_is_not_made_and_the_model_reads_why():
    async with conversing(MULTIPLY, "As you wish.") as talk:
        asking = await talk.whole(tools=[ASKING])
        no = {
            "type": "mcp_approval_response",
            "approval_request_id": asking["output"][-1]["id"],
            "approve": False,
            "reason": "too dear",
        }
        answered = await talk.both(tools=[ASKING], input=[no], previous_response_id=asking["id"])

        assert [item["type"] for item in answered["output"]] == ["message"]
        assert "did not approve this call: too dear." in talk.prompted[-1]
        assert "tools/call" not in talk.tools.heard


async def test_a_function_beside_a_servers_tool_is_the_clients():
    async with conversing(MULTIPLY + "\n" + WEATHER, "Rain, and 56088.") as talk:
        response = await talk.both(tools=[NEVER, *TOOLS])
        _, call, function = response["output"]
        assert (call["output"], function["type"], function["name"]) == ("56088", "function_call", "weather")

        rain = {"type": "function_call_output", "call_id": function["call_id"], "output": "rain"}
        await talk.whole(tools=[NEVER, *TOOLS], input=[rain], previous_response_id=response["id"])
        first, _, second = talk.prompted[-1].partition("56088")
        assert first.count("<tool_call>") == 2
        assert "rain" in second


async def test_a_failing_tool_is_an_item_that_failed_and_the_model_reads_its_error():
    async with conversing(MULTIPLY, "It did not work.") as talk:

        def multiply(a: int, b: int) -> int:
            raise ValueError("no numbers today")

        talk.tools.tools["multiply"] = multiply
        call = (await talk.both())["output"][1]
        assert (call["status"], call["output"]) == ("failed", None)
        assert call["error"] == {
            "type": "mcp_tool_execution_error",
            "content": [{"type": "text", "text": "no numbers today"}],
        }
        assert "no numbers today" in talk.prompted[-1]


async def _sleep(server: ToolServer) -> web.Response:
    await server.waiting.wait()
    return web.Response()


def _endless(request: web.Request) -> Any:
    async def respond() -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: {}\n" * 1000)

    return respond()


MISBEHAVIOUR: dict[str, Any] = {
    "silence": lambda server: lambda request: _sleep(server),
    "status": lambda server: lambda request: web.Response(status=500),
    "redirect": lambda server: lambda request: web.Response(status=307, headers={"Location": server.url}),
    "no JSON": lambda server: lambda request: web.Response(text="<html>"),
    "another id": lambda server: lambda request: web.json_response({"jsonrpc": "2.0", "id": 99, "result": {}}),
    "endless": lambda server: _endless,
    "large": lambda server: lambda request: web.Response(text='"' + "a" * 2**21 + '"'),
    "deep": lambda server: lambda request: web.Response(text="[" * 100_000),
    "compressed": lambda server: lambda request: web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    "cut": lambda server: lambda request: web.Response(text="id: 1\ndata: {", content_type="text/event-stream"),
    "error": lambda server: (
        lambda request: web.json_response({"jsonrpc": "2.0", "id": 3, "error": {"code": -32000, "message": "no"}})
    ),
}


@pytest.mark.parametrize("how", MISBEHAVIOUR)
async def test_a_server_that_misbehaves_costs_its_call(how: str):
    async with conversing(MULTIPLY, "Never mind.", timeout_s=0.3) as talk:
        await talk.whole()
        answer = MISBEHAVIOUR[how](talk.tools)
        talk.tools.misbehave = lambda method, request: answer(request) if method == "tools/call" else None
        response = await talk.whole()
        call = response["output"][1]
        assert (call["status"], response["status"]) == ("failed", "completed")
        assert call["error"]["type"] in ("http_error", "mcp_protocol_error")
        assert "Error: " in talk.prompted[-1]


@pytest.mark.parametrize("how", ["silence", "status", "no JSON", "large"])
async def test_a_list_that_fails_fails_the_request(how: str):
    async with conversing("Never.", timeout_s=0.3) as talk:
        answer = MISBEHAVIOUR[how](talk.tools)
        talk.tools.misbehave = lambda method, request: answer(request) if method == "tools/list" else None
        refused = (await talk.whole(status=424))["error"]
        assert (refused["type"], refused["param"]) == ("external_connector_error", "tools")

        *_, failed, done, last = await talk.events()
        assert (failed["type"], done["type"], last["type"]) == (
            "response.mcp_list_tools.failed",
            "response.output_item.done",
            "response.failed",
        )
        assert last["response"]["error"]["code"] == "tool_server_failed"
        assert (await talk.endpoint.complete(max_tokens=2))["choices"]


async def test_a_slow_server_holds_up_no_other_request():
    async with conversing(MULTIPLY, "Done.") as talk:
        slow = await talk.calling(talk.whole())
        status = talk.endpoint.engine.status()
        assert (status.running, status.waiting, status.tickets) == (0, 0, 1)
        assert [row.state for row in talk.endpoint.engine.requests()] == ["between rounds"]
        assert (await talk.endpoint.complete(max_tokens=2))["choices"]
        talk.tools.waiting.set()
        assert (await slow)["output"][1]["output"] == "56088"


async def test_a_client_that_leaves_ends_its_call():
    async with conversing(MULTIPLY, "Done.") as talk:
        client = await talk.calling(talk.whole())
        client.cancel()
        while talk.tools.heard[-1] != "DELETE":
            await asyncio.sleep(0.01)
        await talk.endpoint.idle()


async def test_a_drain_waits_for_a_call_and_for_the_models_answer_after_it():
    async with conversing(MULTIPLY, "Done.") as talk:
        slow = await talk.calling(talk.events())
        drain = asyncio.create_task(talk.endpoint.engine.drain(60))
        status, _ = await talk.endpoint.post("/v1/completions", {"prompt": [5]})
        assert status == 503
        assert not drain.done()
        talk.tools.waiting.set()
        response = folded(await slow)
        assert (response["status"], response["output"][-1]["content"][0]["text"]) == ("completed", "Done.")
        assert await drain


@pytest.mark.parametrize("background", [False, True])
async def test_a_call_that_outlasts_the_drain_ends_its_response_with_an_event(background: bool):
    async with conversing(MULTIPLY, "Never.") as talk:
        slow = await talk.calling(talk.events(background=background))
        engine = talk.endpoint.engine
        assert not await engine.drain(0)
        engine.fail_all(ServerStopped())
        last = (await slow)[-1]
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "draining")
        assert last["response"]["output"][1]["status"] == "incomplete"
        await engine.admission.emptied()
        await talk.ended()


async def test_an_engine_that_waits_for_a_call_is_not_idle():
    async with conversing(MULTIPLY, "Done.") as talk:
        slow = await talk.calling(talk.whole())
        control = talk.endpoint.engine.control
        control.sleep_if_idle()
        await asyncio.to_thread(time.sleep, 0.001)
        control.sleep_if_idle()
        assert control.idle_s < 0.001
        talk.tools.waiting.set()
        await slow
        control.sleep_if_idle()
        await asyncio.to_thread(time.sleep, 0.001)
        control.sleep_if_idle()
        assert control.idle_s >= 0.001


async def test_an_operator_ends_a_response_during_its_call_and_during_its_answer():
    async with conversing(MULTIPLY, MULTIPLY) as talk:
        slow, engine = await talk.calling(talk.whole(status=503)), talk.endpoint.engine
        assert engine.abort(engine.requests()[0].id)
        assert (await slow)["error"]["code"] == "aborted"

        talk.endpoint.executor.gate.clear()
        answering = asyncio.create_task(talk.whole())
        while not engine.status().running:
            await asyncio.sleep(0)
        assert engine.status().tickets == len(engine.requests()) == 1
        assert engine.abort(next(iter(engine.admission)).id)
        talk.endpoint.executor.gate.set()
        assert (await answering)["status"] == "cancelled"


async def test_calls_are_limited_by_request_and_settings():
    async with conversing(MULTIPLY, MULTIPLY, MULTIPLY, MULTIPLY, "Enough.", calls=3) as talk:
        for fields, made in (({}, 3), ({"max_tool_calls": 2}, 2), ({"parallel_tool_calls": False}, 3)):
            response = await talk.both(**fields)
            assert [item["type"] for item in response["output"]].count("mcp_call") == made
            assert response["status"] == "completed"


async def test_tokens_are_limited_over_all_rounds():
    async with conversing(MULTIPLY, "A rather long answer.") as talk:
        limit = len(MULTIPLY) + 1 + 5
        response = await talk.both(max_output_tokens=limit)
        assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", limit)
        assert response["output"][-1]["content"][0]["text"] == "A rat"

        response = await talk.both(max_output_tokens=10)
        assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "message"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"server_label": "other"}, "server_label"),
        ({"server_label": "maths", "server_url": "http://169.254.169.254/"}, "server_url"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "server_url"),
        ({}, "server_label"),
        ({"server_label": "maths", "headers": {"X": "y"}}, "headers"),
        ({"server_label": "maths", "authorization": "secret"}, "authorization"),
        ({"server_label": "maths", "connector_id": "connector_gmail"}, "connector_id"),
        ({"server_label": "maths", "defer_loading": True}, "defer_loading"),
        ({"server_label": "maths", "allowed_callers": ["programmatic"]}, "allowed_callers"),
    ],
)
async def test_a_server_that_the_settings_do_not_list_is_refused(tool: dict[str, Any], param: str):
    async with conversing("Never.") as talk:
        refused = await talk.whole(status=400, tools=[{"type": "mcp", **tool}])
        assert refused["error"]["param"] == f"tools[0].{param}"
        assert talk.tools.heard == []


async def test_a_configured_url_names_its_server():
    async with conversing(MULTIPLY, "Done.") as talk:
        tool = {**NEVER, "server_label": "my own", "server_url": talk.tools.url}
        response = await talk.both(tools=[tool])
        assert [item["server_label"] for item in response["output"][:2]] == ["my own", "my own"]
        assert response["tools"] == [{**response["tools"][0], **tool}]


async def test_the_operator_and_the_request_choose_among_a_servers_tools(tmp_path: Path):
    secret = tmp_path / "headers"
    secret.write_text("# of maths\nAuthorization: Bearer s3cret\n")
    settings = {"tools": {"maths": "multiply add"}, "header_files": {"maths": str(secret)}}
    async with conversing("Hello.", **settings) as talk:
        talk.tools.tools = dict.fromkeys(("multiply", "add", "erase", "bad name"), lambda a, b: 0)
        talk.tools.annotations = {"add": {"readOnlyHint": True}}

        async def names(**fields: Any) -> list[str]:
            listed = (await talk.whole(tools=[{**NEVER, **fields}]))["output"][0]
            return [tool["name"] for tool in listed["tools"]]

        assert await names() == ["multiply", "add"]
        assert await names(allowed_tools=["add", "erase"]) == ["add"]
        assert await names(allowed_tools={"read_only": True}) == ["add"]
        assert await names(allowed_tools={"read_only": False, "tool_names": ["add"]}) == []
        assert {headers["Authorization"] for headers in talk.tools.headers} == {"Bearer s3cret"}
        assert talk.tools.heard.count("tools/list") == 1
        assert "s3cret" not in json.dumps(await talk.whole())


@pytest.mark.parametrize(
    ("rule", "asks"),
    [
        (None, True),
        ("always", True),
        ("never", False),
        ({"never": {"tool_names": ["multiply"]}}, False),
        ({"never": {"tool_names": ["add"]}}, True),
        ({"always": {"tool_names": ["multiply"]}}, True),
        ({"always": {"read_only": True}}, False),
        ({"never": {}}, True),
    ],
)
async def test_the_request_says_which_calls_need_an_approval(rule: Any, asks: bool):
    async with conversing(MULTIPLY, "Done.") as talk:
        response = await talk.whole(tools=[{**ASKING, "require_approval": rule}])
        assert response["output"][1]["type"] == ("mcp_approval_request" if asks else "mcp_call")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
        {"type": "mcp_approval_response", "approve": True},
    ],
)
async def test_an_approval_of_no_call_is_refused(item: dict[str, Any]):
    async with conversing("Never.") as talk:
        assert (await talk.whole(status=400, input=[item]))["error"]["param"] == "input[0]"


async def test_tools_of_two_servers_may_have_one_name():
    async with tool_server() as other, conversing("Hello.") as talk:
        servers = Servers(McpConfig(servers={"maths": talk.tools.url, "sums": other.url}), {})
        talk.endpoint.server.service.tool_servers = servers
        await talk.whole(tools=[NEVER, {**NEVER, "server_label": "sums"}])
        await servers.close()
        assert '"name": "multiply"' in talk.prompted[0]
        assert '"name": "sums_multiply"' in talk.prompted[0]


async def test_tokens_are_counted_with_the_servers_tools():
    async with conversing("Hello.") as talk:
        response = await talk.whole()
        _, counted = await talk.endpoint.post(f"{PATH}/input_tokens", {"input": "hi", "tools": [NEVER]})
        assert counted["input_tokens"] == response["usage"]["input_tokens"]


async def test_requests_of_the_server_are_answered_and_bounded():
    async with conversing(MULTIPLY, "Done.", timeout_s=2) as talk:
        asked_for = [{"jsonrpc": "2.0", "id": n, "method": m} for n, m in enumerate(("ping", "sampling/createMessage"))]

        def misbehave(method: str, request: web.Request) -> web.Response | None:
            if method != "tools/call":
                return None
            times = 1 if talk.tools.heard.count("tools/call") == 1 else 20
            messages = [*asked_for * times, {"jsonrpc": "2.0", "id": 3, "result": {"content": []}}]
            text = "".join(f"data: {json.dumps(message)}\n\n" for message in messages)
            return web.Response(text=text, content_type="text/event-stream")

        talk.tools.misbehave = misbehave
        await talk.whole()
        assert talk.tools.heard.count("reply") == 2
        call = (await talk.whole())["output"][1]
        assert "requests of its own" in call["error"]["message"]


async def test_servers_that_ask_before_they_answer_are_answered_while_all_connections_are_in_use():
    async with conversing(MULTIPLY, "Done.", connections=2, timeout_s=5) as talk:
        met, replied = asyncio.Barrier(2), asyncio.Semaphore(0)

        async def ask(request: web.Request) -> web.StreamResponse:
            answer = {"jsonrpc": "2.0", "id": (await request.json())["id"], "result": {"content": []}}
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await met.wait()  # both connections are in use
            await response.write(b'data: {"jsonrpc": "2.0", "id": 1, "method": "ping"}\n\n')
            await replied.acquire()
            await response.write(f"data: {json.dumps(answer)}\n\n".encode())
            return response

        def misbehave(method: str, request: web.Request) -> Any:
            if method == "reply":
                replied.release()
            return ask(request) if method == "tools/call" else None

        talk.tools.misbehave = misbehave
        for response in await asyncio.gather(talk.whole(), talk.whole()):
            assert response["output"][1]["status"] == "completed"


async def test_requests_at_one_server_are_bounded():
    async with conversing(MULTIPLY, "Done.", connections=2) as talk:
        await talk.whole()
        open_calls = most = 0
        first_answers = len(talk.prompted) + 6

        async def multiply(a: int, b: int) -> int:
            nonlocal open_calls, most
            open_calls += 1
            most = max(most, open_calls)
            while len(talk.prompted) < first_answers or talk.endpoint.engine.status().running:
                await asyncio.sleep(0)
            open_calls -= 1
            return a * b

        talk.tools.tools["multiply"] = multiply
        await asyncio.gather(*(talk.whole() for _ in range(6)))
        assert most == 2


def test_settings_that_name_no_server_are_refused(tmp_path: Path):
    bad = tmp_path / "headers"
    bad.write_text("no header\n")
    url = {"maths": "http://127.0.0.1:1/mcp"}
    for settings, said in (
        ({"tools": {"maths": "add"}}, "mcp.tools: maths"),
        ({"servers": url, "header_files": {"maths": str(bad)}}, "headers:1"),
        ({"servers": url, "header_files": {"maths": str(tmp_path / "none")}}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            Servers.read(msgspec.convert(settings, McpConfig))
