"""Thoughts and tool calls through the whole endpoint, streamed and not, parsed by the openai package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from infd.constraint import AfterThought, Calls, JsonObject
from infd.errors import GrammarFailed
from tests.engine.fake_grammars import FakeGrammars
from tests.http.model import TEMPLATE
from tests.http.scripted import ids_of, speaking
from tests.text.templates import TOOLS

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

openai = pytest.importorskip("openai")
streaming = pytest.importorskip("openai.lib.streaming.chat")

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PARIS = '{"city": "Paris", "days": 1}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


async def both(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    """Request an answer streamed and whole, check that the openai package parses both equally, and return it."""
    said = {"model": "alias", "messages": USER, "extra_body": {"seed": 0} | fields}
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="k", max_retries=0) as client:
        whole = (await client.chat.completions.create(**said)).model_dump(exclude_unset=True)
        state: Any = streaming.ChatCompletionStreamState()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(**said, **options):
            state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot.model_dump(exclude_unset=True)
    assert len(streamed["choices"]) == len(whole["choices"])
    for ours, theirs in zip(whole["choices"], streamed["choices"], strict=True):
        assert message(theirs) == message(ours)
        assert theirs["finish_reason"] == ours["finish_reason"]
    # The prompt of the second request is cached.
    for answer in (whole, streamed):
        answer["usage"].pop("prompt_tokens_details")
    assert streamed["usage"] == whole["usage"]
    return whole


def message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a choice without call ids, which are random."""
    said = choice["message"]
    calls = said.get("tool_calls") or []
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    assert all(call["type"] == "function" for call in calls)
    assert said["role"] == "assistant"
    assert said.get("reasoning") == said.get("reasoning_content")
    return {
        "content": said["content"],
        "thought": said.get("reasoning"),
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
    }


class Refusing(FakeGrammars):
    """Records the last constraint, and refuses it."""

    constraint: Any = None

    async def compile(self, constraint: Any) -> Any:
        self.constraint = constraint
        raise GrammarFailed("refused")


async def test_a_thought_and_a_call_come_beside_the_content():
    answer = f"<think>\nParis – which?\n</think>\n\nLet me see.\n{CALL}\n{SECOND}"
    async with speaking(answer) as endpoint:
        body = await both(endpoint, tools=TOOLS)

    (choice,) = body["choices"]
    assert message(choice) == {
        "content": "Let me see.",
        "thought": "Paris – which?",
        "calls": [("weather", PARIS), ("time", "{}")],
    }
    assert choice["finish_reason"] == "tool_calls"
    thought = len("<think>\nParis – which?\n</think>".encode()) - len("<think")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert body["usage"]["completion_tokens"] == len(answer.encode()) + 1


async def test_an_answer_of_calls_alone_has_no_content():
    async with speaking(CALL) as endpoint:
        (choice,) = (await both(endpoint, tools=TOOLS, tool_choice="auto", **NO_THOUGHT))["choices"]

    assert message(choice) == {"content": None, "thought": None, "calls": [("weather", PARIS)]}


async def test_arguments_are_streamed_as_they_are_written():
    async with speaking(CALL) as endpoint:
        events = await endpoint.events(CHAT, {"messages": USER, "seed": 0, "tools": TOOLS, **NO_THOUGHT})

    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first, *rest = calls
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": first["function"]["arguments"]},
    }
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert len(rest) >= len(PARIS) // 2
    assert "".join(call["function"]["arguments"] for call in calls) == PARIS
    assert not any(delta.get("content") for delta in deltas)


async def test_functions_are_the_older_form_of_tools():
    functions = [tool["function"] for tool in TOOLS]
    async with speaking(f"Let me see.\n{CALL}\n{SECOND}") as endpoint:
        (choice,) = (await both(endpoint, functions=functions, **NO_THOUGHT))["choices"]
        (plain,) = (await both(endpoint, functions=functions, function_call="none", **NO_THOUGHT))["choices"]
        events = await endpoint.events(CHAT, {"messages": USER, "seed": 0, "functions": functions, **NO_THOUGHT})

    assert choice["message"]["function_call"] == {"name": "weather", "arguments": PARIS}
    assert choice["message"]["content"] == "Let me see."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    assert "function_call" not in plain["message"]
    assert plain["message"]["content"].endswith("</tool_call>")
    deltas = [event["choices"][0]["delta"].get("function_call") for event in events if event["choices"]]
    first, *rest = filter(None, deltas)
    assert first["name"] == "weather"
    assert all(set(delta) == {"arguments"} for delta in rest)
    assert "".join(delta["arguments"] for delta in (first, *rest)) == PARIS


async def test_messages_in_the_older_form_are_read_as_tool_calls_and_results():
    function = {"name": "weather", "arguments": PARIS}
    older = [
        *USER,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    newer = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "weather", "content": "rain"},
    ]
    async with speaking() as endpoint:
        _, one = await endpoint.post(
            f"{CHAT}/render", {"messages": older, "functions": [tool["function"] for tool in TOOLS]}
        )
        _, other = await endpoint.post(f"{CHAT}/render", {"messages": newer, "tools": TOOLS})

    assert one["prompt"] == other["prompt"]
    assert "rain" in one["prompt"]


async def test_a_named_function_is_forced_once():
    grammars = Refusing()
    async with speaking("", grammars=grammars) as endpoint:
        fields = {"functions": [{"name": "f"}, {"name": "g"}], "function_call": {"name": "g"}}
        _, refusal = await endpoint.post(CHAT, {"messages": USER, **fields, **NO_THOUGHT})

    calls = grammars.constraint.answer if isinstance(grammars.constraint, AfterThought) else grammars.constraint
    assert isinstance(calls, Calls)
    assert (calls.required, calls.parallel, [tool.name for tool in calls.tools]) == (True, False, ["g"])
    assert refusal["error"]["param"] == "function_call"


async def test_each_choice_makes_its_own_calls():
    answers = (f"<think>a</think>{CALL}", SECOND, "<think>b</think>No.")
    async with speaking(*answers) as endpoint:
        body = await both(endpoint, tools=TOOLS, n=3, temperature=1)

    assert [message(choice) for choice in body["choices"]] == [
        {"content": None, "thought": "a", "calls": [("weather", PARIS)]},
        {"content": None, "thought": None, "calls": [("time", "{}")]},
        {"content": "No.", "thought": "b", "calls": []},
    ]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "tool_calls", "stop"]


async def test_a_thought_cut_by_length_is_no_content():
    async with speaking("<think>\nOn and on.\n</think>\n\nYes.") as endpoint:
        body = await both(endpoint, max_tokens=14)

    assert message(body["choices"][0]) == {"content": None, "thought": "On and", "calls": []}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


async def test_a_call_cut_by_length_has_finish_reason_length():
    async with speaking(CALL) as endpoint:
        (choice,) = (await both(endpoint, tools=TOOLS, max_tokens=60, **NO_THOUGHT))["choices"]

    assert message(choice)["calls"] == [("weather", PARIS[: 60 - CALL.index(PARIS)])]
    assert choice["finish_reason"] == "length"


async def test_without_parallel_calls_only_the_first_is_kept():
    async with speaking(f"{CALL}\n{SECOND}") as endpoint:
        (choice,) = (await both(endpoint, tools=TOOLS, parallel_tool_calls=False, **NO_THOUGHT))["choices"]

    assert message(choice)["calls"] == [("weather", PARIS)]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {}, {"tool_choice": "auto"}])
async def test_where_no_tool_may_be_called_nothing_is_a_call(fields: dict[str, Any]):
    async with speaking(CALL) as endpoint:
        (choice,) = (await both(endpoint, **fields, **NO_THOUGHT))["choices"]
        _, prompt = await endpoint.post(f"{CHAT}/render", {"messages": USER, **fields})

    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert "weather" not in prompt["prompt"].replace("What is the weather", "")


async def test_a_hidden_thought_is_counted_but_not_shown():
    async with speaking("<think>hm</think>Yes.") as endpoint:
        body = await both(endpoint, include_reasoning=False)

    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_stop_string_ends_the_text_as_the_model_writes_it():
    async with speaking(f"<think>\nOne. Two.\n</think>\n\n{CALL}") as endpoint:
        thinking = (await both(endpoint, tools=TOOLS, stop=["Two"]))["choices"][0]
        calling = (await both(endpoint, tools=TOOLS, stop=["days"]))["choices"][0]
        mark = (await both(endpoint, tools=TOOLS, stop=["</think>"]))["choices"][0]

    assert message(thinking) == {"content": None, "thought": "One. ", "calls": []}
    assert (thinking["finish_reason"], thinking["stop_reason"]) == ("stop", "Two")
    assert message(calling)["calls"] == [("weather", '{"city": "Paris", "')]
    assert (calling["finish_reason"], calling["stop_reason"]) == ("tool_calls", "days")
    assert message(mark) == {"content": None, "thought": "One. Two.", "calls": []}


async def test_every_token_has_its_logprob_and_id_whatever_it_is_part_of():
    answer = f"<think>hm</think>{CALL}"
    asked = {"messages": USER, "seed": 0, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    async with speaking(answer) as endpoint:
        _, body = await endpoint.post(CHAT, asked)
        events = await endpoint.events(CHAT, asked)

    (choice,) = body["choices"]
    assert choice["token_ids"][:-1] == ids_of(answer)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    parts = [event["choices"][0] for event in events]
    assert [i for part in parts for i in part.get("token_ids", ())] == choice["token_ids"]
    assert [p for part in parts for p in (part["logprobs"] or {"content": []})["content"]] == choice["logprobs"][
        "content"
    ]


async def test_the_model_reads_tools_calls_and_results_as_its_template_writes_them():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "blue"}'},
    ]
    async with speaking() as endpoint:
        status, body = await endpoint.post(f"{CHAT}/render", {"messages": messages, "tools": TOOLS})
        _, tokens = await endpoint.post("/tokenize", {"messages": messages, "tools": TOOLS})
        template = endpoint.server.served.template if endpoint.server.served is not None else None

    assert status == 200
    assert template is not None
    call["function"]["arguments"] = json.loads(PARIS)  # type: ignore[index]
    assert body["prompt"] == template.render(messages, tools=TOOLS)
    assert tokens["tokens"] == body["token_ids"]


async def test_a_final_thought_may_be_continued():
    messages = [*USER, {"role": "assistant", "content": "<think>\nIt is"}]
    async with speaking(" blue.</think>Blue.") as endpoint:
        (choice,) = (await both(endpoint, messages=messages, continue_final_message=True))["choices"]

    assert message(choice) == {"content": "Blue.", "thought": " blue.", "calls": []}


@pytest.mark.parametrize(("effort", "end"), [("none", "</think>\n\n"), ("low", "assistant\n"), ("high", "assistant\n")])
async def test_reasoning_effort_maps_to_the_templates_own_switch(effort: str, end: str):
    asked = {"messages": USER, "reasoning_effort": effort}
    async with speaking() as endpoint:
        _, body = await endpoint.post(f"{CHAT}/render", asked)
        _, mine = await endpoint.post(f"{CHAT}/render", {**asked, **NO_THOUGHT})

    assert body["prompt"].endswith(end)
    assert mine["prompt"].endswith("</think>\n\n")


async def test_a_feature_the_model_lacks_is_refused_by_name():
    async with speaking("", template=TEMPLATE.replace("enable_thinking", "other")) as endpoint:
        for fields, param in [({"tools": TOOLS}, "tools"), ({"reasoning_effort": "low"}, "reasoning_effort")]:
            status, body = await endpoint.post(CHAT, {"messages": USER, **fields})
            assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, "unsupported")
        status, _ = await endpoint.post(CHAT, {"messages": USER, "seed": 0, "tools": TOOLS, "tool_choice": "none"})
        assert status == 200
        status, _ = await endpoint.post(CHAT, {"messages": USER, "seed": 0, "reasoning_effort": "none"})
        assert status == 200


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def called(arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}
    return {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}


DEEP = json.loads('{"a":' * 80 + "1" + "}" * 80)
NAMED = {"type": "function", "function": {"name": "f"}}


def custom(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "custom", "custom": {"name": "f"} | fields}]}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def allowed(tool: dict[str, Any]) -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [NAMED] * 600}, "tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    (function(name="with space"), "tools[0].function.name"),
    (function(name="a" * 200), "tools[0].function.name"),
    (function(description=1), "tools[0].function.description"),
    (function(parameters=[]), "tools[0].function.parameters"),
    (function(parameters="{}"), "tools[0].function.parameters"),
    (function(parameters=DEEP), "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    (function() | {"tool_choice": "required"}, "tool_choice"),
    (function() | {"tool_choice": NAMED}, "tool_choice"),
    (function() | {"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    (function() | {"response_format": {"type": "json_object"}}, "response_format"),
    (function(strict=True), "tools[0].function.strict"),
    (function() | {"tool_choice": {"type": "function"}}, "tool_choice.function"),
    (function() | {"tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice.custom"),
    (function() | {"tool_choice": {"type": "retrieval"}}, "tool_choice.type"),
    (function() | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    (function() | allowed({"type": "function", "function": {"name": "g"}}), "tool_choice.allowed_tools.tools"),
    (function() | allowed({"type": "retrieval"}), "tool_choice.allowed_tools.tools.type"),
    (custom(name="with space"), "tools[0].custom.name"),
    (custom(format={"type": "grammar"}), "tools[0].custom.format.grammar"),
    (custom(format={"type": "lines"}), "tools[0].custom.format.type"),
    (custom(format=grammar("gbnf", "")), "tools[0].custom.format.grammar.syntax"),
    (function() | {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    (function() | {"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    (function(parameters=[]) | {"tool_choice": "required"}, "tools[0].function.parameters"),
    (function() | {"tool_choice": "some"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"functions": [{"name": "with space"}]}, "functions[0].name"),
    ({"functions": [{"name": "f", "parameters": []}]}, "functions[0].parameters"),
    ({"functions": [{"name": "f"}]} | function(), "functions"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    (called("{"), "messages[1].tool_calls[0].function.arguments"),
    (called("[]"), "messages[1].tool_calls[0].function.arguments"),
    (called(json.dumps(DEEP)), "messages[1].tool_calls[0].function.arguments"),
    (called({"a": 1}), "messages[1].tool_calls[0].function.arguments"),
    (called("{}", type="custom"), "messages[1].tool_calls[0].custom"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
]


async def test_an_invalid_tool_field_is_named():
    async with speaking("") as endpoint:
        for fields, param in WRONG:
            status, body = await endpoint.post(CHAT, {"messages": USER, **fields})
            assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_calls_and_answers_are_constrained_after_the_thought(choice: str):
    grammars, fields = Refusing(), {"tool_choice": choice, "response_format": {"type": "json_object"}}
    async with speaking("", grammars=grammars) as endpoint:
        await endpoint.post(CHAT, {"messages": USER, **function(), **fields})

    assert isinstance(grammars.constraint, AfterThought)
    calls = grammars.constraint.answer
    assert isinstance(calls, Calls)
    assert (calls.required, calls.otherwise) == ((True, None) if choice == "required" else (False, JsonObject()))


async def test_a_call_without_arguments_may_have_an_empty_text_of_them():
    async with speaking("") as endpoint:
        status, body = await endpoint.post(f"{CHAT}/render", called(""))

    assert status == 200
    assert '"arguments": {}' in body["prompt"]


async def test_the_completions_endpoint_returns_the_models_raw_text():
    answer = f"<think>hm</think>{CALL}"
    async with speaking(answer) as endpoint:
        body = await endpoint.complete(prompt="hi<think>\n", max_tokens=500)

    assert body["choices"][0]["text"] == answer
    assert "completion_tokens_details" not in body["usage"]


INPUT = 'SELECT "é😀"\\n\tFROM \\\\'
QUERY: Any = {"type": "custom", "custom": {"name": "query", "description": "SQL"}}


def query(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "query", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": INPUT}), INPUT),
        (json.dumps({"input": INPUT}, ensure_ascii=False), INPUT),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"input": [1, "é"]}', '[1,"é"]'),
        ("{}", ""),
        ('{"input": ""}', ""),
    ],
)
async def test_a_custom_tool_is_called_with_text(arguments: str, text: str):
    answer = query(arguments) + "\n" + CALL
    body = {"messages": USER, "seed": 0, "tools": [*TOOLS, QUERY], **NO_THOUGHT}
    async with speaking(answer) as endpoint:
        _, whole = await endpoint.post(CHAT, body)
        events = await endpoint.events(CHAT, body)
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="k", max_retries=0) as client:
            said = await client.chat.completions.create(model="alias", messages=USER, tools=[*TOOLS, QUERY], seed=0)

    first, second = whole["choices"][0]["message"]["tool_calls"]
    assert first == {"id": first["id"], "type": "custom", "custom": {"name": "query", "input": text}}
    assert second["function"] == {"name": "weather", "arguments": PARIS}
    assert said.choices[0].message.tool_calls[0].custom.input == text
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    begun, *rest = [call for call in deltas if call["index"] == 0]
    assert begun == {"index": 0, "id": begun["id"], "type": "custom", "custom": begun["custom"]}
    assert begun["custom"]["name"] == "query"
    assert all(set(call) == {"index", "custom"} and set(call["custom"]) == {"input"} for call in rest)
    assert "".join(call["custom"]["input"] for call in (begun, *rest)) == text
    assert len([call for call in rest if call["custom"]["input"]]) >= (len(text) // 2 if text == INPUT else 0)
    assert "".join(call["function"]["arguments"] for call in deltas if call["index"] == 1) == PARIS
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("end", range(1, 12))
async def test_an_input_that_max_tokens_cuts_ends_with_the_last_token(end: int):
    call = query('{"input": "ab\\nc"}')
    at = len(call[: call.index("ab") + end].encode())
    async with speaking(call) as endpoint:
        body = {"messages": USER, "seed": 0, "tools": [QUERY], "max_tokens": at, **NO_THOUGHT}
        _, whole = await endpoint.post(CHAT, body)
        events = await endpoint.events(CHAT, body)

    (made,) = whole["choices"][0]["message"]["tool_calls"]
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(each["custom"]["input"] for each in deltas) == made["custom"]["input"]
    assert made["custom"]["input"] == ("a", "ab", "ab", "ab\n", "ab\nc")[min(end, 5) - 1]


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ("auto", False),
        ("required", True),
        ({"type": "custom", "custom": {"name": "f"}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [QUERY]}}, True),
    ],
)
async def test_the_grammar_of_an_input_is_enforced(choice: Any, required: bool):
    grammars, lark = Refusing(), 'start: "a"+'
    tools = [QUERY, *custom(format=grammar("lark", lark))["tools"]]
    if isinstance(choice, dict) and "allowed_tools" in choice:
        choice["allowed_tools"]["tools"] = tools[1:]
    async with speaking("", grammars=grammars) as endpoint:
        status, body = await endpoint.post(
            CHAT, {"messages": USER, "tools": tools, "tool_choice": choice, **NO_THOUGHT}
        )

    assert (status, body["error"]["message"]) == (400, "refused")
    assert isinstance(grammars.constraint, Calls)
    assert grammars.constraint.required is required
    tool = grammars.constraint.tools[-1]
    assert (tool.name, tool.lark, tool.param) == ("f", lark, "tools[1].custom.format.grammar.definition")


async def test_a_pattern_of_an_input_is_enforced_as_the_arguments_schema():
    grammars = Refusing()
    async with speaking("", grammars=grammars) as endpoint:
        tools = custom(format=grammar("regex", "[0-9]+"))
        await endpoint.post(CHAT, {"messages": USER, **tools, "tool_choice": "required", **NO_THOUGHT})

    (tool,) = grammars.constraint.tools
    assert json.loads(tool.parameters)["properties"] == {"input": {"type": "string", "pattern": "^(?:[0-9]+)$"}}


async def test_a_call_of_a_custom_tool_is_rendered_with_its_input():
    made = {"id": "c", "type": "custom", "custom": {"name": "query", "input": 'a "b"'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    async with speaking("") as endpoint:
        status, body = await endpoint.post(f"{CHAT}/render", {"messages": messages, "tools": [QUERY]})

    assert status == 200
    assert '"arguments": {"input": "a \\"b\\""}' in body["prompt"]
