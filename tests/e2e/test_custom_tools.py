"""Custom tools with a grammar: the openai package against a daemon, forced and chosen, streamed and not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lark
import pytest

from tests.e2e.process import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

openai = pytest.importorskip("openai")

LARK = r"""
start: verb " " "\"" NAME "\"" [" at " HOUR]
verb: "call" | "greet"
NAME: /[A-Z][a-z]{2,5}/
HOUR: /1?[0-9]/ ("am" | "pm")
"""
GRAMMARS = {"lark": LARK, "regex": '(call|greet) "[A-Z][a-z]{2,5}"( at 1?[0-9](am|pm))?'}
GREETING: Any = [{"role": "user", "content": "Greet Anna, at 9am."}]
SAID: dict[str, Any] = {"model": "embedded", "seed": 7, "temperature": 1.0}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    # A prompt that is found in the cache is cut elsewhere, and its rounding may draw another token.
    cut_alike = ["--set", "cache.prefix_caching=false"]
    daemon = Daemon(tmp_path_factory.mktemp("custom"), ["--device", "cpu", "--set", "device.threads=1", *cut_alike], {})
    try:
        host, port = daemon.ready().address
        with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="k", max_retries=0, timeout=120) as client:
            yield client
    finally:
        daemon.close()


def tool(syntax: str) -> dict[str, Any]:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": GRAMMARS[syntax]}}
    return {"type": "custom", "custom": {"name": "do", "description": "Do it", "format": format}}


def flat(syntax: str) -> dict[str, Any]:
    format = {"type": "grammar", "syntax": syntax, "definition": GRAMMARS[syntax]}
    return {"type": "custom", "name": "do", "description": "Do it", "format": format}


def check(input: str) -> None:
    lark.Lark(LARK, parser="earley").parse(input)


NAMED = {"type": "custom", "custom": {"name": "do"}}


@pytest.mark.parametrize("syntax", GRAMMARS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_input_in_chat_follows_its_grammar(client: openai.OpenAI, syntax: str, choice: Any):
    asked: Any = {**SAID, "messages": GREETING, "tools": [tool(syntax)], "tool_choice": choice, "max_tokens": 150}
    (choice,) = client.chat.completions.create(**asked).choices
    (call, *_) = choice.message.tool_calls
    assert (choice.finish_reason, call.type, call.custom.name) == ("tool_calls", "custom", "do")
    check(call.custom.input)

    events = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    deltas = [each for event in events for each in event.delta.tool_calls or () if each.index == 0]
    assert "".join(each.custom["input"] for each in deltas) == call.custom.input
    assert len(deltas) > 3
    assert events[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_an_input_that_the_model_chooses_to_write_follows_its_grammar(client: openai.OpenAI, syntax: str):
    opening = {"role": "assistant", "content": "<tool_call>\n"}
    asked: Any = {**SAID, "messages": [*GREETING, opening], "tools": [tool(syntax)], "max_tokens": 150}
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    calls = 0
    for seed in range(4):
        (choice,) = client.chat.completions.create(**asked | {"seed": seed}, extra_body=continued).choices
        for call in choice.message.tool_calls or ():
            calls += 1
            check(call.custom.input)
    for seed in range(6):
        body: Any = {**SAID, "messages": GREETING, "tools": [tool(syntax)], "max_tokens": 150, "seed": seed}
        (choice,) = client.chat.completions.create(**body).choices
        for call in choice.message.tool_calls or ():
            calls += 1
            check(call.custom.input)
    assert calls


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_a_forced_input_in_responses_follows_its_grammar(client: openai.OpenAI, syntax: str):
    asked: Any = {**SAID, "input": "Greet Anna.", "tools": [flat(syntax)], "tool_choice": "required"}
    asked = {name: value for name, value in asked.items() if name != "seed"} | {"extra_body": {"seed": 7}}
    (call,) = (item for item in client.responses.create(**asked).output if item.type == "custom_tool_call")
    check(call.input)

    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event.input for event in events if event.type == "response.custom_tool_call_input.done")
    assert "".join(deltas) == done == call.input
    assert len(deltas) > 3


def test_a_grammar_that_is_not_kept_is_a_400_that_names_it(client: openai.OpenAI):
    wrong = tool("lark")
    wrong["custom"]["format"]["grammar"]["definition"] = "start: /a(?=b)/"
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**SAID, messages=GREETING, tools=[wrong])
    assert error.value.param == "tools[0].custom.format.grammar.definition"
    assert "look-around" in str(error.value)
