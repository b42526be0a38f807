"""Templates of GLM-4 write the calls, results and tools of OpenAI's API as they write those in fields of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infd.text.chat import ChatTemplate, Compiled
from infd.text.fuel import Limits
from tests.text.renderers.conversations import TOOLS, USER
from tests.text.templates import published

GLM4, GLM4_CHAT = "xinference/GLM-4-0414", "xinference/GLM-4-9B-chat"
SYSTEM = {"role": "system", "content": "Be brief."}


def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [call("1", "weather", {"city": "Paris"})]}
TWICE = {"role": "assistant", "content": None, "tool_calls": [call("1", "weather", {"a": 1}), call("2", "now", {})]}
RESULTS = [{"role": "tool", "tool_call_id": id, "content": f"result {id}"} for id in "12"]


def conversation(name: str, *, tools: bool) -> tuple[str, str]:
    """Return a conversation as infd renders it, and as the template renders messages in fields of its own."""
    template = ChatTemplate({"default": published()[name]})
    offered = TOOLS if tools else None
    rendered = template.render([SYSTEM, USER, CALLED, RESULTS[0], TWICE, *RESULTS], tools=offered)
    stated = [{"role": "system", "content": "", "tools": TOOLS}] if tools and name == GLM4_CHAT else []
    own: list[dict[str, Any]] = [
        *(*stated, SYSTEM, USER),
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "metadata": "weather", "content": '{"city": "Paris"}'},
        {"role": "observation", "content": "result 1"},
        {"role": "assistant", "metadata": "weather", "content": '{"a": 1}'},
        {"role": "assistant", "metadata": "now", "content": "{}"},
        {"role": "observation", "content": "result 1"},
        {"role": "observation", "content": "result 2"},
    ]
    source = Compiled(published()[name])
    variables = {"messages": own, "tools": None if name == GLM4_CHAT else offered, "add_generation_prompt": True}
    return rendered, source.render(variables, Limits())


@pytest.mark.parametrize("name", [GLM4, GLM4_CHAT])
@pytest.mark.parametrize("tools", [True, False])
def test_calls_results_and_tools_are_written_as_in_the_templates_own_fields(name: str, tools: bool):
    rendered, own = conversation(name, tools=tools)
    assert rendered == own
    assert ("# 可用工具" in rendered) == tools


def test_several_calls_and_results_are_written_as_ms_swift_writes_them():
    rendered, _ = conversation(GLM4_CHAT, tools=False)
    assert rendered.endswith(
        '<|assistant|>weather\n{"a": 1}<|assistant|>now\n{}'
        "<|observation|>\nresult 1<|observation|>\nresult 2<|assistant|>"
    )


def test_an_answer_after_a_call_may_be_continued():
    template = ChatTemplate({"default": published()[GLM4]})
    messages = [USER, CALLED, RESULTS[0], {"role": "assistant", "content": "It is"}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|observation|>\nresult 1<|assistant|>\nIt is")


@pytest.mark.parametrize("name", [GLM4, GLM4_CHAT])
def test_templates_of_dialects_read_tools_and_no_other_template_is_changed(name: str):
    template = ChatTemplate({"default": published()[name]})
    assert template.reads("tools", tools=True)
    other = ChatTemplate({"default": published()["llama.cpp/GLM-4.6"]})
    assert other.render([USER, {**CALLED, "tool_calls": TWICE["tool_calls"]}]).count("<|assistant|>") == 2
