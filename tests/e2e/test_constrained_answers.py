"""Constrained answers of the embedded model: forced and strict calls, thoughts before a constraint, other fields."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from infd import embedded
from infd.text.tokenizer import Tokenizer
from tests.e2e.process import Daemon
from tests.thorough import among

if TYPE_CHECKING:
    from collections.abc import Iterator

openai = pytest.importorskip("openai")
streaming = pytest.importorskip("openai.lib.streaming.chat")

USER: Any = [{"role": "user", "content": "What's the weather in Lisbon?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Lisbon", "Porto"]}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Get the weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_weather_now", "description": "Get all weather"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather_now"}}
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
SCHEMA["additionalProperties"] = False
FORMAT = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    daemon = Daemon(
        tmp_path_factory.mktemp("embedded"),
        ["--device", "cpu", "--dtype", "float32", "--set", "device.threads=1"],
        {},
    )
    try:
        host, port = daemon.ready().address
        with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        daemon.close()


def ask(client: openai.OpenAI, *, thinking: bool = False, stream: bool = False, **fields: Any) -> list[Any]:
    """Return the choices of an answer."""
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}} | fields.pop("extra", {})
    said = {"model": "embedded", "messages": USER, "max_tokens": 200, "seed": 1, "extra_body": extra} | fields
    if not stream:
        return client.chat.completions.create(**said).choices
    state: Any = streaming.ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**said, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices


def calls(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


def thought(choice: Any) -> str | None:
    return getattr(choice.message, "reasoning", None)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_choice_calls_with_and_without_a_thought(client: openai.OpenAI, thinking: bool, stream: bool):
    for choice_of_tool, names in (("required", {"get_weather", "get_weather_now"}), (NAMED, {"get_weather_now"})):
        choices = ask(
            client, thinking=thinking, stream=stream, tools=TOOLS, tool_choice=choice_of_tool, n=3, temperature=1.5
        )
        for choice in choices:
            if choice.finish_reason == "length":
                continue
            assert choice.finish_reason == "tool_calls"
            assert {name for name, _ in calls(choice)} <= names
            assert not choice.message.content
            assert thinking or not thought(choice)
        assert any(choice.finish_reason == "tool_calls" for choice in choices)
        assert not thinking or any(thought(choice) for choice in choices)


def test_streamed_calls_are_those_of_a_whole_answer(client: openai.OpenAI):
    fields = {"tools": TOOLS, "tool_choice": "required", "n": 4, "temperature": 1.5, "thinking": True}
    whole, streamed = (ask(client, stream=stream, **fields) for stream in (False, True))
    assert [(calls(each), thought(each), each.finish_reason) for each in whole] == [
        (calls(each), thought(each), each.finish_reason) for each in streamed
    ]


def test_without_parallel_calls_there_is_exactly_one(client: openai.OpenAI):
    choices = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=8, temperature=1.5)
    assert [len(calls(choice)) for choice in choices] == [1] * 8


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema whose documents are short, so that most answers end."""
    kinds = ["integer", "boolean", "string", "enum", "pattern", "null", "any_of"] + ["object", "array"] * (depth < 2)
    match draw.choice(kinds) if depth else "object":
        case "integer":
            low = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}
        case "string":
            return {"type": "string", "maxLength": draw.randint(0, 8)}
        case "enum":
            return {"enum": draw.sample(["a", "<tool_call>", "</think>", 1.5, None, True, "é\n", '"', {"a": 1}], 3)}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-c]{2,4}$", "^<x>[0-9]+</x>$", "^$"])}
        case "any_of":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
        case "array":
            return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": draw.randint(0, 3)}
        case "object":
            names = draw.sample(["a", "city", "with space", 'quote"', "ü"], draw.randint(0, 4))
            properties = {name: random_schema(draw, depth + 1) for name in names}
            required = [name for name in names if draw.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


def random_tools(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a request with tools of random arguments."""
    schemas = {f"tool_{number}": random_schema(draw) for number in range(draw.randint(1, 3))}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": draw.random() < 0.7}}
        for name, schema in schemas.items()
    ]
    named = {"type": "function", "function": {"name": draw.choice(list(schemas))}}
    return {
        "tools": tools,
        "tool_choice": draw.choice(["required", "auto", named]),
        "thinking": draw.random() < 0.5,
        "stream": draw.random() < 0.5,
        "seed": draw.randrange(1000),
    }


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, among(8, 8, 24)))]
)
def test_arguments_of_random_tools_validate(client: openai.OpenAI, seed: int):
    draw, finished = random.Random(seed), 0
    asked = [random_tools(draw) for _ in range(8)]
    with ThreadPoolExecutor(len(asked)) as pool:  # together they take as many steps as the longest answer
        answers = list(pool.map(lambda fields: ask(client, **fields, n=4, temperature=1.5, max_tokens=300), asked))
    for fields, choices in zip(asked, answers, strict=True):
        functions = {tool["function"]["name"]: tool["function"] for tool in fields["tools"]}
        free = fields["tool_choice"] == "auto"
        strict = {name for name, function in functions.items() if not free or function["strict"]}
        for choice in choices:
            if choice.finish_reason == "length":
                continue
            finished += 1
            called = calls(choice)
            assert (choice.finish_reason == "tool_calls") == bool(called)
            assert called or free
            for name, arguments in called:
                if name in strict:
                    jsonschema.validate(arguments, functions[name]["parameters"])
                elif strict:
                    assert name in functions
    assert finished >= 16


def test_a_strict_tool_leaves_text_free_and_binds_its_calls(client: openai.OpenAI):
    strict: list[Any] = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    (said,) = ask(client, tools=strict, messages=[{"role": "user", "content": "What is 7 times 8?"}], temperature=0)
    assert "56" in said.message.content
    assert said.finish_reason == "stop"
    bound = ask(client, tools=strict, n=8, temperature=1.5)
    for name, arguments in (call for choice in bound if choice.finish_reason == "tool_calls" for call in calls(choice)):
        jsonschema.validate(arguments, CITY if name == "get_weather" else {"maxProperties": 0})


@pytest.mark.parametrize("thinking", [False, True])
def test_beside_tools_an_answer_is_calls_or_text_of_its_format(client: openai.OpenAI, thinking: bool):
    messages = [*USER, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "What is 7 times 8?"}]
    found = set()
    for said in (USER, messages):
        for choice in ask(
            client, tools=TOOLS, response_format=FORMAT, messages=said, n=8, temperature=1.5, thinking=thinking
        ):
            found.add(choice.finish_reason)
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            elif choice.finish_reason == "tool_calls":
                assert not choice.message.content
    assert found >= {"stop", "tool_calls"}


def test_a_constraint_begins_after_the_thought(client: openai.OpenAI):
    for stream in (False, True):
        choices = ask(client, thinking=True, stream=stream, response_format=FORMAT, n=6, temperature=1.2)
        ended = [choice for choice in choices if choice.finish_reason == "stop"]
        assert any(thought(choice) for choice in ended)
        for choice in ended:
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            assert choice.message.content.startswith("{")


def test_a_constraint_begins_after_a_thought_that_the_prompt_has_opened(client: openai.OpenAI):
    messages = [*USER, {"role": "assistant", "content": "<think>\nThe user wants"}]
    choices = ask(client, messages=messages, extra={"continue_final_message": True}, response_format=FORMAT, n=4)
    for choice in choices:
        assert choice.finish_reason == "stop"
        assert thought(choice)
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_thought_without_an_end_is_cut_by_length(client: openai.OpenAI):
    (choice,) = ask(client, thinking=True, response_format=FORMAT, temperature=0, max_tokens=5)
    assert choice.finish_reason == "length"
    assert thought(choice)
    assert not choice.message.content


def constrained(client: openai.OpenAI, pattern: str, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    (choice,) = ask(client, extra={"structured_outputs": {"regex": pattern}} | (extra or {}), **fields)
    return choice


def test_a_stop_string_cuts_a_constrained_answer(client: openai.OpenAI):
    choice = constrained(client, "[a-c]{3}END[a-c]{3}", stop=["END"])
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "END"
    assert len(choice.message.content) == 3


def test_log_probabilities_are_those_before_the_mask(client: openai.OpenAI):
    fields: Any = {"logprobs": True, "top_logprobs": 5, "temperature": 0, "max_tokens": 1}
    (free,) = ask(client, **fields)
    bound = constrained(client, "[0-9]{9}", **fields)
    first, forced = free.logprobs.content[0], bound.logprobs.content[0]
    assert [each.token for each in forced.top_logprobs] == [each.token for each in first.top_logprobs]
    assert [each.logprob for each in forced.top_logprobs] == [each.logprob for each in first.top_logprobs]
    assert forced.token.isdigit()
    assert forced.logprob < min(each.logprob for each in forced.top_logprobs)


def test_a_complete_answer_ends_whatever_min_tokens_and_ignore_eos_say(client: openai.OpenAI):
    exact = constrained(client, "[0-9]{4}", {"min_tokens": 50, "ignore_eos": True}, temperature=1.5)
    assert (exact.finish_reason, len(exact.message.content)) == ("stop", 4)
    for seed in range(4):
        longer = constrained(client, "a{1,20}", {"ignore_eos": True}, temperature=1.5, seed=seed)
        assert longer.finish_reason == "stop"
        assert set(longer.message.content) == {"a"}


def test_min_tokens_lets_a_grammar_go_on_that_may(client: openai.OpenAI):
    choice = constrained(client, "[0-9]+", {"min_tokens": 30}, max_tokens=60, temperature=1.5)
    assert len(choice.message.content) >= 30
    assert choice.message.content.isdigit()


def test_bad_words_and_biases_choose_among_the_tokens_of_the_grammar(client: openai.OpenAI):
    tokenizer = Tokenizer.load(embedded.path())
    ids = {digit: tokenizer.encode(digit)[0] for digit in "0123456789"}
    for seed in range(5):
        choice = constrained(client, "[67]", {"bad_words": ["7"]}, temperature=1.5, seed=seed)
        assert choice.message.content == "6"
    biased = constrained(client, "[0-9]", temperature=0, logit_bias={str(ids["5"]): 100})
    assert biased.message.content == "5"
    outside = constrained(client, "[0-9]", temperature=0, logit_bias={str(tokenizer.encode("Z")[0]): 100})
    assert outside.message.content.isdigit()


def test_where_fields_and_grammar_allow_nothing_the_error_says_so(client: openai.OpenAI):
    for extra in ({"bad_words": ["7"]}, {"allowed_token_ids": [5]}):
        with pytest.raises(openai.BadRequestError) as caught:
            constrained(client, "7", extra)
        assert caught.value.code == "nothing_allowed"


def test_a_continued_message_is_constrained_from_where_it_goes_on(client: openai.OpenAI):
    messages = [*USER, {"role": "assistant", "content": "It has been 2"}]
    choice = constrained(client, "[0-9]{1,3} degrees", {"continue_final_message": True}, messages=messages)
    assert choice.finish_reason == "stop"
    assert choice.message.content.endswith(" degrees")


@pytest.mark.parametrize("path", ["", ".properties.a"])
def test_arguments_that_cannot_be_kept_name_their_tool(client: openai.OpenAI, path: str):
    wrong: Any = {"$ref": "https://example.com/schema"}
    schema = {"type": "object", "properties": {"a": wrong}, "required": ["a"]} if path else wrong
    tools: list[Any] = [*TOOLS, {"type": "function", "function": {"name": "far", "parameters": schema}}]
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, tools=tools, tool_choice="required")
        assert caught.value.param == "tools[2].function.parameters"
        assert caught.value.code == "unsupported_grammar"
    assert ask(client, tools=tools, tool_choice="auto")
