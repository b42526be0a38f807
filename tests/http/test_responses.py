"""OpenAI's Responses API over a real socket, without OpenAI's package."""

from __future__ import annotations

import asyncio
import itertools
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, ServerConfig, StoreConfig
from infd.http.auth import Keys
from infd.http.schema.chat import MESSAGES
from infd.http.store.memory import MemoryStore
from tests import fakes
from tests.http.endpoint import decode_named_events, serving
from tests.http.model import chat_prompt, foretell
from tests.http.scripted import speaking
from tests.http.test_streaming import held_stream
from tests.http.test_tools import CALL, PARIS, SECOND
from tests.text.templates import TEMPLATES, published
from tests.text.templates import TOOLS as CHAT_TOOLS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from infd.scheduler.plan import StepPlan
    from tests.http.endpoint import Endpoint

PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
CUSTOM: Any = {"type": "custom", "name": "weather", "description": "free text"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "alias", "input": "hi", "seed": 0, **fields}


async def get(endpoint: Endpoint, path: str, status: int = 200, **headers: str) -> dict[str, Any]:
    async with endpoint.session.get(path, headers=headers) as response:
        body = await response.json()
        assert response.status == status, body
        return body


PAIRS = {
    "response.output_item.added": "response.output_item.done",
    "response.content_part.added": "response.content_part.done",
}


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response of the last event; check numbers, pairs, and that deltas add up to it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, *between, last = events
    kinds = ["response.queued"] * created["response"]["background"] + ["response.in_progress"]
    begun, between = between[: len(kinds)], between[len(kinds) :]
    assert [created["type"], *(event["type"] for event in begun)] == ["response.created", *kinds]
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    opened: list[tuple[Any, ...]] = []
    items: list[dict[str, Any]] = []
    texts: dict[tuple[str, str], str] = {}
    for event in between:
        kind, place = event["type"], (event["output_index"], event.get("content_index"))
        assert event["output_index"] == len(items) - (kind != "response.output_item.added")
        if kind in PAIRS:
            opened.append((PAIRS[kind], place))
            if kind == "response.output_item.added":
                items.append(event["item"])
        elif kind in PAIRS.values():
            assert opened.pop() == (kind, place)
            if "item" in event:
                assert event["item"] == response["output"][event["output_index"]]
        else:
            assert event["item_id"] == items[-1]["id"]
            name, _, state = kind.rpartition(".")
            key = (items[-1]["id"], name)
            if state == "delta":
                texts[key] = texts.get(key, "") + event["delta"]
            else:
                whole = next(event[field] for field in ("text", "arguments", "input") if field in event)
                assert texts.get(key, "") == whole
    assert not opened
    assert len(items) == len(response["output"])
    return response


def stripped(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without ids, times and the counts of the cache."""
    untold = ("id", "created_at", "completed_at", "usage")
    said = {name: value for name, value in response.items() if name not in untold}
    tokens = response["usage"]["input_tokens"], response["usage"]["output_tokens"]
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in said["output"]]
    return {**said, "output": output, "tokens": tokens}


async def both(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    """Request a response whole, streamed and in the background, check that all are equal, and return it."""
    status, whole = await endpoint.post(PATH, asked(**fields))
    assert status == 200, whole
    assert stripped(folded(await endpoint.named_events(PATH, asked(**fields)))) == stripped(whole)
    assert await get(endpoint, f"{PATH}/{whole['id']}") == whole
    behind = folded(await endpoint.named_events(PATH, asked(**fields, background=True)))
    assert stripped({**behind, "background": False}) == stripped(whole)
    return whole


async def test_a_response_is_the_models_text(endpoint: Endpoint):
    response = await both(endpoint, max_output_tokens=12, metadata={"a": "b"}, top_p=1.0)

    assert (response["object"], response["model"], response["metadata"]) == ("response", "alias", {"a": "b"})
    (message,) = response["output"]
    assert message["content"][0]["text"] == foretell(chat_prompt("hi"), 12)[1]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 12


async def test_thoughts_text_and_calls_are_items_in_order():
    answer = f"<think>\nParis – which?\n</think>\n\nLet me see.\n{CALL}\n{SECOND}"
    async with speaking(answer) as endpoint:
        response = await both(endpoint, tools=TOOLS)

    thought, message, *calls = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Paris – which?"}]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "weather", PARIS),
        ("function_call", "time", "{}"),
    ]
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_one_call_is_made_where_calls_are_limited():
    async with speaking(CALL + SECOND) as endpoint:
        for fields in ({"parallel_tool_calls": False}, {"max_tool_calls": 1}):
            (call,) = (await both(endpoint, tools=TOOLS, **fields))["output"]
            assert call["name"] == "weather"


async def test_a_custom_tool_is_called_with_text():
    async with speaking(
        '<tool_call>\n{"name": "weather", "arguments": {"input": "a \\"b\\""}}\n</tool_call>'
    ) as endpoint:
        (call,) = (await both(endpoint, tools=[CUSTOM]))["output"]

    assert (call["type"], call["input"]) == ("custom_tool_call", 'a "b"')


async def test_logprobs_come_with_the_text(endpoint: Endpoint):
    response = await both(endpoint, max_output_tokens=6, top_logprobs=2, include=["message.output_text.logprobs"])

    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 6
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


async def test_logprobs_are_those_of_the_messages_tokens():
    async with speaking(f"<think>\nLet me see.\n</think>\n\nLet me see.\n{CALL}") as endpoint:
        response = await both(endpoint, tools=TOOLS, top_logprobs=1)

    (content,) = response["output"][1]["content"]
    assert "".join(entry["token"] for entry in content["logprobs"]) == content["text"] == "Let me see."


@pytest.mark.parametrize(
    ("template", "call", "said"),
    [
        ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "Paris"),
        ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "call"),
        ("llama.cpp/Qwen3-Coder", XML_CALL, "Paris"),
        (
            "llama.cpp/Qwen3-Coder",
            XML_CALL,
            '{"city": "Paris"}',
        ),  # its arguments, written as JSON
    ],
)
async def test_logprobs_of_a_message_are_its_own_where_a_call_before_it_has_its_text(
    monkeypatch: pytest.MonkeyPatch, template: str, call: str, said: str
):
    text = f"<think>\n\n</think>\n\n{call}\n{said}" if template == "qwen3" else f"{call}\n{said}"
    generated, tokens = itertools.count(), len(text) + 1
    monkeypatch.setattr(fakes, "likeliness", lambda token: -float(next(generated) % tokens))
    async with speaking(
        text, template=TEMPLATES[template] if template in TEMPLATES else published()[template]
    ) as endpoint:
        response = await both(endpoint, tools=TOOLS, top_logprobs=1)
        chatted = {"messages": [{"role": "user", "content": "hi"}], "seed": 0, "logprobs": True, "top_logprobs": 1}
        _, chat = await endpoint.post("/v1/chat/completions", chatted)

    everything = chat["choices"][0]["logprobs"]["content"]
    *_, message = response["output"]
    (content,) = message["content"]
    assert content["text"] == said
    assert content["logprobs"] == everything[len(text) - len(said) : len(text)]


async def test_items_are_rendered_as_openais_messages():
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    theirs = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    async with speaking("ok") as endpoint:
        _, ours = await endpoint.post(f"{PATH}/input_tokens", {"input": items, "tools": TOOLS})
        _, openai = await endpoint.post("/v1/chat/completions/render", {"messages": theirs, "tools": CHAT_TOOLS})

    assert ours == {"object": "response.input_tokens", "input_tokens": openai["count"]}


async def test_a_conversation_goes_on_from_a_stored_response():
    async with speaking("<think>hm</think>Yes.") as endpoint:
        _, first = await endpoint.post(PATH, asked(input="one"))
        _, second = await endpoint.post(PATH, asked(input="two", previous_response_id=first["id"]))
        listed = await get(endpoint, f"{PATH}/{second['id']}/input_items?order=asc&limit=3")
        rest = await get(endpoint, f"{PATH}/{second['id']}/input_items?order=asc&after={listed['last_id']}")
        said = {"input": "two", "previous_response_id": first["id"]}
        _, counted = await endpoint.post(f"{PATH}/input_tokens", said)
        _, deleted = await delete(endpoint, first["id"])
        status, missing = await endpoint.post(PATH, asked(previous_response_id=first["id"]))

    assert [item["type"] for item in listed["data"]] == ["message", "reasoning", "message"]
    assert (listed["has_more"], rest["has_more"]) == (True, False)
    assert listed["data"][2] == first["output"][1] | {
        "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]
    }
    assert rest["data"][0]["content"] == [{"type": "input_text", "text": "two"}]
    assert counted["input_tokens"] == second["usage"]["input_tokens"]
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert (status, missing["error"]["code"]) == (404, "response_not_found")


async def delete(endpoint: Endpoint, id: str) -> tuple[int, dict[str, Any]]:
    async with endpoint.session.delete(f"{PATH}/{id}") as response:
        return response.status, await response.json()


async def test_a_response_in_the_background_is_read_again_from_any_event(endpoint: Endpoint):
    _, queued = await endpoint.post(PATH, asked(background=True, max_output_tokens=20))
    assert (queued["status"], queued["completed_at"]) == ("queued", None)
    path = f"{PATH}/{queued['id']}?stream=true"
    events = decode_named_events(await text_of(endpoint, path))

    assert folded(events) == await get(endpoint, f"{PATH}/{queued['id']}")
    for after in (0, 3, len(events) - 1):
        assert decode_named_events(await text_of(endpoint, f"{path}&starting_after={after}")) == events[after + 1 :]
    _, plain = await endpoint.post(PATH, asked(max_output_tokens=2))
    assert (await get(endpoint, f"{PATH}/{plain['id']}?stream=true", 400))["error"]["param"] == "stream"


async def text_of(endpoint: Endpoint, path: str) -> str:
    async with endpoint.session.get(path) as response:
        assert response.status == 200
        return await response.text()


async def test_a_cancelled_response_stops_its_work(endpoint: Endpoint):
    _, queued = await endpoint.post(PATH, asked(background=True, max_output_tokens=200))
    reader = asyncio.ensure_future(text_of(endpoint, f"{PATH}/{queued['id']}?stream=true"))
    status, cancelled = await endpoint.post(f"{PATH}/{queued['id']}/cancel", {})

    assert (status, cancelled["status"]) == (200, "cancelled")
    last = decode_named_events(await reader)[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
    await endpoint.idle()
    assert (await endpoint.post(f"{PATH}/{queued['id']}/cancel", {}))[1] == cancelled


async def test_a_cancelled_response_has_the_text_of_its_events(endpoint: Endpoint):
    def pause(plan: StepPlan) -> None:
        if any(span.start > 40 for span in plan.spans):
            endpoint.executor.gate.clear()

    endpoint.executor.fault = pause
    body = asked(background=True, stream=True, max_output_tokens=200)
    async with endpoint.session.post(PATH, json=body) as response:
        events = [json.loads(line[6:]) async for line in _data(response, 6)]
        path = f"{PATH}/{events[0]['response']['id']}"
        _, cancelled = await endpoint.post(f"{path}/cancel", {})
        endpoint.executor.fault = None
        endpoint.executor.gate.set()
        rest = decode_named_events(await text_of(endpoint, f"{path}?stream=true"))

    assert (rest[-1]["type"], rest[-1]["response"]) == ("response.incomplete", cancelled)
    (message,) = cancelled["output"]
    assert (cancelled["status"], message["status"]) == ("cancelled", "incomplete")
    assert message["content"][0]["text"] == "".join(event.get("delta", "") for event in rest) != ""
    assert await get(endpoint, path) == cancelled


async def _data(response: aiohttp.ClientResponse, count: int) -> AsyncIterator[bytes]:
    """Yield the data of the first `count` events."""
    while count:
        if (line := await response.content.readline()).startswith(b"data: "):
            count -= 1
            yield line


async def test_an_error_in_the_background_is_a_failed_response(endpoint: Endpoint):
    def fault(plan: StepPlan) -> None:
        if any(span.start > 40 for span in plan.spans):
            raise RuntimeError("broken")

    endpoint.executor.fault = fault
    events = await endpoint.named_events(PATH, asked(background=True, max_output_tokens=100))
    foreground = await endpoint.named_events(PATH, asked(max_output_tokens=100))

    for stream in (events, foreground):
        assert (stream[-1]["type"], stream[-1]["response"]["error"]["code"]) == ("response.failed", "internal_error")
    again = await get(endpoint, f"{PATH}/{events[-1]['response']['id']}")
    assert again["status"] == "failed"


async def test_another_keys_response_does_not_exist():
    lines = (f"{name}:{sha256(secret.encode()).hexdigest()}" for name, secret in (("ann", "a"), ("bob", "b")))
    async with serving(keys=Keys.parse("\n".join(lines), "keys")) as endpoint:
        mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        _, response = await endpoint.post(PATH, asked(max_output_tokens=2), **mine)
        path = f"{PATH}/{response['id']}"
        assert await get(endpoint, path, **mine) == response
        assert (await get(endpoint, path, 404, **other))["error"]["code"] == "response_not_found"
        said = asked(previous_response_id=response["id"])
        assert (await endpoint.post(PATH, said, **other))[0] == 404
        async with endpoint.session.delete(path, headers=other) as refused:
            assert refused.status == 404


async def test_a_response_that_shall_not_be_stored_is_not(endpoint: Endpoint):
    _, response = await endpoint.post(PATH, asked(max_output_tokens=2, store=False))

    assert await get(endpoint, f"{PATH}/{response['id']}", 404)
    assert (await endpoint.post(PATH, asked(store=False, background=True)))[0] == 400


async def test_the_stores_bounds_are_settings():
    async with serving(Config(store=StoreConfig(entries=1))) as endpoint:
        ids = [(await endpoint.post(PATH, asked(max_output_tokens=2)))[1]["id"] for _ in range(2)]
        for id, status in zip(ids, (404, 200), strict=True):
            await get(endpoint, f"{PATH}/{id}", status)


JSON_TEXT = {"format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0].server_url"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "text": JSON_TEXT}, "structured_outputs.regex"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"conversation": 1}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"input": "xyz" * 100}, "input"),
    ],
)
async def test_a_bad_request_is_refused_by_its_field(endpoint: Endpoint, fields: dict[str, Any], param: str):
    for stream in (False, True):
        status, body = await endpoint.post(PATH, asked(stream=stream, **fields))
        assert (status, body["error"]["param"]) == (400, param), body


async def test_a_long_conversation_is_cut_where_truncation_is_auto(endpoint: Endpoint):
    status, body = await endpoint.post(PATH, asked(input="xyz" * 100, truncation="auto", max_output_tokens=5))

    assert (status, body["usage"]["output_tokens"]) == (200, 5)


@pytest.mark.parametrize("digits", ["", "-1", "1.5", "٣", "0" * 12 + "101", "9" * 5000])
async def test_a_number_in_the_query_is_refused_beyond_its_bounds(endpoint: Endpoint, digits: str):
    _, response = await endpoint.post(PATH, asked(background=True, max_output_tokens=2))
    path = f"{PATH}/{response['id']}"

    refused = await get(endpoint, f"{path}/input_items?limit={digits}", 400)
    assert refused["error"]["param"] == "limit"
    refused = await get(endpoint, f"{path}?stream=true&starting_after={digits}", 400)
    assert refused["error"]["param"] == "starting_after"
    models = await get(endpoint, f"/v1/models?limit={digits}", 400, **{"anthropic-version": "2023-06-01"})
    assert models["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("place", [{"text": {"format": {"schema": 0}}}, {"tools": TOOLS[:1], "tool_choice": "none"}])
async def test_a_body_that_is_not_utf8_is_refused(endpoint: Endpoint, place: dict[str, Any]):
    place = {**place, "tools": [{**tool, "parameters": 0} for tool in place.get("tools", ())]}
    body = json.dumps(asked(max_output_tokens=2, **place))
    for name in ("schema", "parameters"):
        body = body.replace(f'"{name}": 0', f'"{name}": "\\"')
    status, refused = await endpoint.post(PATH, body.encode().replace(b'"\\"', b'"\xff"'))

    assert (status, refused["error"]["code"]) == (400, "invalid_json")


async def test_a_response_in_the_background_counts_for_its_keys_cap():
    keys = Keys.parse(f"ann:{sha256(b'a').hexdigest()} in_flight=2", "keys")
    async with serving(keys=keys) as endpoint:
        endpoint.executor.gate.clear()
        mine = {"Authorization": "Bearer a"}
        long = asked(background=True, max_output_tokens=200)
        both = [await endpoint.post(PATH, long, **mine) for _ in range(2)]
        status, refused = await asyncio.wait_for(endpoint.post(PATH, asked(), **mine), 10)
        for _, response in both:
            cancelled = await endpoint.post(f"{PATH}/{response['id']}/cancel", {}, **mine)
            assert cancelled[1]["status"] == "cancelled"
        endpoint.executor.gate.set()
        again, _ = await endpoint.post(PATH, asked(max_output_tokens=2), **mine)

    assert [code for code, _ in both] == [200, 200]
    assert (status, refused["error"]["code"]) == (429, "key_in_flight")
    assert again == 200


async def test_the_stores_bytes_count_everything_that_a_response_keeps(endpoint: Endpoint):
    store = endpoint.server.service.store
    assert isinstance(store, MemoryStore)
    items, previous = [{"role": "user", "content": ""}] * 1000, None
    for turn in range(1, 5):
        body = asked(input=items, background=True, previous_response_id=previous)
        failed = (await endpoint.named_events(PATH, body))[-1]["response"]
        assert failed["error"]["code"] == "context_length_exceeded"
        if previous is not None:
            await delete(endpoint, previous)
        previous = failed["id"]
        assert store.bytes > turn * 1000 * 20
    await delete(endpoint, previous)
    await endpoint.named_events(PATH, asked(max_output_tokens=100, top_logprobs=20))
    assert store.bytes > 100 * 20 * 50


async def test_a_conversation_too_large_to_be_stored_does_not_begin_in_the_background():
    async with serving(Config(store=StoreConfig(bytes=4000))) as endpoint:
        status, refused = await endpoint.post(PATH, asked(input="x" * 4000, background=True))

    assert (status, refused["error"]["param"], len(endpoint.server.service.background)) == (400, "input", 0)


async def test_an_event_is_one_line_however_the_request_is_written(endpoint: Endpoint):
    body = asked(stream=True, max_output_tokens=2, tools=TOOLS, tool_choice="none")
    body["text"] = {"format": {"type": "text", "schema": {}}}
    written = json.dumps(body, indent=1).replace("{}", "{\n\n}").encode()
    async with endpoint.session.post(PATH, data=written) as response:
        events = decode_named_events(await response.text())

    told = folded(events)
    assert [tool["parameters"] for tool in told["tools"]] == [tool["parameters"] for tool in TOOLS]
    assert told["text"]["format"]["schema"] == {}


async def test_the_input_of_a_response_that_failed_is_listed(endpoint: Endpoint):
    items = [{"role": "user"}, {"type": "reasoning"}, {"role": "user", "content": "hi"}]
    _, response = await endpoint.post(PATH, asked(input=items, background=True))
    await text_of(endpoint, f"{PATH}/{response['id']}?stream=true")
    listed = await get(endpoint, f"{PATH}/{response['id']}/input_items?order=asc")

    assert [item.get("content", item.get("summary")) for item in listed["data"]] == [
        [],
        [],
        [{"type": "input_text", "text": "hi"}],
    ]


async def test_earlier_responses_count_against_the_limits_of_a_conversation():
    config = Config(server=ServerConfig(max_body_bytes=3000))
    async with serving(config) as endpoint:
        _, first = await endpoint.post(PATH, asked(input="x" * 2000, background=True))
        await text_of(endpoint, f"{PATH}/{first['id']}?stream=true")
        on = asked(input="x" * 1000, previous_response_id=first["id"])
        refused = [await endpoint.post(path, on) for path in (PATH, f"{PATH}/input_tokens")]
        short = asked(previous_response_id=first["id"], truncation="auto", max_output_tokens=2)
        counted = await endpoint.post(f"{PATH}/input_tokens", short)

    for status, body in refused:
        assert (status, body["error"]["param"]) == (400, "previous_response_id")
        assert body["error"]["code"] == "context_length_exceeded"
    assert counted[0] == 200


async def test_a_conversation_has_as_many_items_as_a_request_may_have():
    items = [{"role": "user", "content": ""}] * MESSAGES
    async with serving(Config(server=ServerConfig(max_body_bytes=2**22))) as endpoint:
        _, first = await endpoint.post(PATH, asked(input=items, background=True))
        await text_of(endpoint, f"{PATH}/{first['id']}?stream=true")
        status, refused = await endpoint.post(PATH, asked(previous_response_id=first["id"]))

    assert (status, refused["error"]["param"]) == (400, "input")
    assert f"{MESSAGES} items" in refused["error"]["message"]


async def test_a_stream_that_fails_before_its_first_event_stores_nothing():
    async with held_stream(PATH, asked(input=[{"role": "user"}])) as (endpoint, asking):
        async with await asking as response:
            endpoint.engine.control.resume()
            (error,) = decode_named_events(await response.text())
        assert (error["type"], error["param"]) == ("error", "input[0]")
        store = endpoint.server.service.store
        assert isinstance(store, MemoryStore)
        assert len(store) == 0


async def test_a_response_refused_in_the_background_is_counted(endpoint: Endpoint):
    await endpoint.named_events(PATH, asked(input="xyz" * 100, background=True))

    assert endpoint.server.service.metrics.rejected == {"context_length_exceeded": 1}
