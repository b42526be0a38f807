"""Anthropic's messages API over a real socket, without Anthropic's package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.http.auth import Keys
from tests.http.endpoint import serving
from tests.http.model import MODEL, chat_prompt, foretell, tokenizer
from tests.http.scripted import speaking
from tests.http.test_tools import CALL, PARIS, SECOND
from tests.text.templates import TEMPLATES
from tests.text.templates import TOOLS as CHAT_TOOLS

if TYPE_CHECKING:
    from infd.scheduler.plan import StepPlan
    from tests.http.endpoint import Endpoint

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: Any = {"role": "user", "content": "hi"}
# An assistant's message with a block that no request may contain.
ANSWER: Any = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}, {"type": "image"}],
}
UNANSWERED: Any = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}],
}
THINK: Any = {"thinking": {"type": "enabled"}}
PROMPT = [*chat_prompt("hi"), *tokenizer().encode("<think></think>", add_special_tokens=False)]
VERSION = {"anthropic-version": "2023-06-01"}
TOOLS: Any = [
    {"input_schema" if name == "parameters" else name: value for name, value in tool["function"].items()}
    for tool in CHAT_TOOLS
]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "alias", "max_tokens": 500, "messages": [USER], "seed": 0, **fields}


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of which a stream tells; check the order of events and the indices of blocks."""
    first, *between, delta, stop = events
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    texts: list[str] = []
    opened = False
    for event in between:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not opened
            opened = True
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_stop":
            assert opened
            opened = False
            block = message["content"][-1]
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(texts[-1])
        else:
            assert event["type"] == "content_block_delta"
            kind, block = event["delta"]["type"], message["content"][-1]
            field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(kind)
            if field is None:
                assert kind == "input_json_delta"
                texts[-1] += event["delta"]["partial_json"]
            else:
                block[field] += event["delta"][field]
    assert not opened
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


async def both(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    """Request an answer whole and streamed, check that both are equal, and return it."""
    body = asked(**fields)
    status, whole = await endpoint.post(PATH, body)
    assert status == 200, whole
    stream = folded(await endpoint.named_events(PATH, body))
    cached = stream["usage"]
    for message in (whole, stream):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("call_")
    whole_usage = whole["usage"]
    assert (cached["input_tokens"] + cached["cache_read_input_tokens"]) == (
        whole_usage["input_tokens"] + whole_usage["cache_read_input_tokens"]
    )
    assert cached["output_tokens"] == whole_usage["output_tokens"]
    stream["usage"] = whole_usage
    assert stream == whole
    return whole


async def test_a_message_is_the_models_text(endpoint: Endpoint):
    message = await both(endpoint, max_tokens=12, system="be brief")
    alone = await both(endpoint, max_tokens=12)

    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "alias")
    assert alone["content"][0]["text"] == foretell(PROMPT, 12)[1] != message["content"][0]["text"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert alone["usage"]["output_tokens"] == 12
    assert alone["usage"]["input_tokens"] + alone["usage"]["cache_read_input_tokens"] == len(PROMPT)


async def test_text_thoughts_and_calls_are_blocks_in_order():
    answer = f"<think>\nParis – which?\n</think>\n\nLet me see.\n{CALL}\n{SECOND}"
    async with speaking(answer) as endpoint:
        message = await both(endpoint, tools=TOOLS, **THINK)

    thought, text, *calls = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Paris – which?")
    assert thought["signature"]
    assert text == {"type": "text", "text": "Let me see."}
    assert calls == [
        {"type": "tool_use", "name": "weather", "input": json.loads(PARIS)},
        {"type": "tool_use", "name": "time", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_text_behind_a_call_is_a_block_of_its_own():
    async with speaking(f"One.{CALL}Two.{SECOND}Three.") as endpoint:
        message = await both(endpoint, tools=TOOLS)

    kinds = [(block["type"], block.get("text") or block.get("name")) for block in message["content"]]
    assert kinds == [
        ("text", "One."),
        ("tool_use", "weather"),
        ("text", "Two."),
        ("tool_use", "time"),
        ("text", "Three."),
    ]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Paris", oops}', {"city": "Paris"}),
        ('{"city": "a\nb", "days": 1}', {"city": "a\nb", "days": 1}),
        ('{"days": tru', {"days": None}),
        ('{"days": [1, 2, }', {"days": [1, 2]}),
    ],
)
async def test_malformed_arguments_are_an_object_all_the_same(arguments: str, read: dict[str, Any]):
    async with speaking(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}') as endpoint:
        message = await both(endpoint, tools=TOOLS)

    assert message["content"][-1] == {"type": "tool_use", "name": "weather", "input": read}


async def test_a_thought_that_was_not_requested_is_counted_but_not_shown():
    always = TEMPLATES["qwen3"].replace("enable_thinking is false", "enable_thinking is none")
    async with speaking("<think>hm</think>Yes.", template=always) as endpoint:
        plain, omitted = await both(endpoint), await both(endpoint, thinking={"type": "adaptive", "display": "omitted"})
    async with speaking("Yes.") as endpoint:
        _, rendered = await endpoint.post(f"{PATH}/render", asked())

    assert plain["content"] == [{"type": "text", "text": "Yes."}]
    assert plain["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert [block["type"] for block in omitted["content"]] == ["thinking", "text"]
    assert omitted["content"][0]["thinking"] == ""
    assert rendered["prompt"].endswith("</think>\n\n")


async def test_a_stop_sequence_is_named(endpoint: Endpoint):
    text = (await both(endpoint, max_tokens=40))["content"][0]["text"]
    message = await both(endpoint, stop_sequences=[text[5:8], "never"])

    assert message["content"] == [{"type": "text", "text": text[:5]}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[5:8])


async def test_max_tokens_is_cut_to_the_context(endpoint: Endpoint):
    message = await both(endpoint, max_tokens=100_000)

    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 256 - len(PROMPT)


async def test_a_conversation_with_tools_is_rendered_as_openais():
    call: Any = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                thought,
                {"type": "text", "text": "I look."},
                call,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1"}
    system = [billing, {"type": "text", "text": "Be kind."}]
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    theirs = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]
    async with speaking("ok") as endpoint:
        _, ours = await endpoint.post(f"{PATH}/render", asked(messages=said, system=system, tools=TOOLS, **THINK))
        _, openai = await endpoint.post("/v1/chat/completions/render", {"messages": theirs, "tools": CHAT_TOOLS})
        status, counted = await endpoint.post(COUNT, {"messages": said, "system": system, "tools": TOOLS, **THINK})

    assert ours["prompt"] == openai["prompt"]
    assert (status, counted) == (200, {"input_tokens": ours["count"]})


async def test_a_final_message_of_the_assistant_is_continued(endpoint: Endpoint):
    said = [USER, {"role": "assistant", "content": "abc"}]
    _, rendered = await endpoint.post(f"{PATH}/render", asked(messages=said))

    assert rendered["prompt"].endswith("<|im_start|>assistant\nabc")
    assert await both(endpoint, messages=said, max_tokens=5)


async def test_counting_reads_calls_without_results():
    async with speaking("ok") as endpoint:
        counts = []
        for messages in ([USER], [USER, UNANSWERED]):
            _, body = await endpoint.post(COUNT, {"messages": messages, "tools": TOOLS})
            counts.append(body["input_tokens"])

    assert counts[1] > counts[0] + 20  # a call, and the opening of an answer


async def test_counting_needs_no_place_in_the_context(endpoint: Endpoint):
    status, body = await endpoint.post(COUNT, {"messages": [{**USER, "content": "xyz" * 200}]})

    assert status == 200
    assert body["input_tokens"] > 256


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "messages[0].content[0]"),
        ({"messages": [USER, ANSWER]}, 400, "messages[1].content[2].type"),
        ({"messages": [USER, ANSWER, USER]}, 400, "messages[1].content[2].type"),
        ({"stop_sequences": ["x"] * 100}, 400, "stop_sequences"),
        ({"messages": [USER, UNANSWERED]}, 400, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 400, "tool_choice.name"),
        ({"mcp_servers": [{"url": "http://x"}]}, 400, "mcp_servers"),
        ({"messages": [{**USER, "content": "xyz" * 100}]}, 400, "messages"),
        ({"model": "claude"}, 404, "claude"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_anthropics_shape(
    endpoint: Endpoint, fields: dict[str, Any], status: int, words: str, stream: bool
):
    async with endpoint.session.post(PATH, json=asked(stream=stream, **fields)) as response:
        body = await response.json()
        assert response.status == status, body
        assert response.headers["request-id"] == response.headers["X-Request-Id"]

    assert set(body) == {"type", "error"}
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert words in body["error"]["message"]


async def test_an_error_within_a_stream_ends_it(endpoint: Endpoint):
    def fault(plan: StepPlan) -> None:
        if any(span.start > 60 for span in plan.spans):
            raise RuntimeError("broken")

    endpoint.executor.fault = fault
    *_, last = await endpoint.named_events(PATH, asked(max_tokens=150))

    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_either_header_carries_the_key():
    async with serving(keys=Keys.of("k")) as endpoint:
        for headers, status in (
            ({"X-Api-Key": "k"}, 200),
            ({"Authorization": "Bearer k"}, 200),
            ({"X-Api-Key": "j"}, 401),
        ):
            got, body = await endpoint.post(PATH, asked(max_tokens=1), **headers)
            assert got == status, body
        assert (await endpoint.post(PATH, asked(), Authorization="Bearer j", **{"X-Api-Key": "k"}))[0] == 401
        assert body["error"]["type"] == "authentication_error"
        assert (await endpoint.post(COUNT, {"messages": [USER]}))[1]["error"]["type"] == "authentication_error"


async def test_models_have_anthropics_shape_for_its_clients(endpoint: Endpoint):
    async def get(path: str, status: int = 200) -> dict[str, Any]:
        async with endpoint.session.get(path, headers=VERSION) as response:
            assert response.status == status
            return await response.json()

    endpoint.server.served = msgspec.structs.replace(endpoint.server.service.model(), adapters={"tuned": "/a"})
    page = await get("/v1/models?limit=2")
    rest = await get(f"/v1/models?after_id={page['last_id']}")
    before = await get("/v1/models?before_id=tuned&limit=1")

    assert ([card["id"] for card in page["data"]], page["has_more"]) == ([MODEL, "alias"], True)
    assert ([card["id"] for card in rest["data"]], rest["has_more"]) == (["tuned"], False)
    assert [card["id"] for card in before["data"]] == ["alias"]
    assert await get(f"/v1/models/{MODEL}") == page["data"][0]
    assert page["data"][0] | {"type": "model", "created_at": "1970-01-01T00:00:01Z"} == page["data"][0]
    assert (await get("/v1/models/none", 404))["error"]["type"] == "not_found_error"
    assert (await get("/v1/models?limit=0", 400))["type"] == "error"
    assert (await get("/v1/nothing", 404))["error"]["type"] == "not_found_error"
