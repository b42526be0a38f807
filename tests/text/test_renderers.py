"""Renderers render what the families' own code renders, and refuse what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infd.errors import ConfigError, InvalidRequest
from infd.text import renderers
from infd.text.chat import ChatTemplate
from infd.text.syntax import Syntax
from tests.http.model import tokenizer
from tests.text.renderers.conversations import CALLED, CONVERSATIONS, RESULTS, TOOLS, USER
from tests.text.templates import published

RECORDED = Path(__file__).parent / "renderers"


def chat(name: str) -> ChatTemplate:
    return ChatTemplate.of_renderer(renderers.RENDERERS[name])


def recorded(name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("case", recorded("deepseek_v32"))
def test_deepseek_v32_renders_what_its_own_encoding_does(case: str):
    name, _, mode = case.rpartition(", ")
    messages, tools = CONVERSATIONS[name]
    said = chat("deepseek_v32").render(messages, tools=tools, kwargs={"thinking": mode == "thinking"})
    assert said == recorded("deepseek_v32")[case]


def test_the_recorded_conversations_have_thoughts_calls_and_results():
    found = recorded("deepseek_v32")
    assert len(found) >= len(CONVERSATIONS) + 5
    assert any("It says rain." not in text and "Again.</think>" in text for text in found.values())


@pytest.mark.parametrize("name", ["one question", "several turns", "offered tools", "parallel calls"])
def test_deepseek_v32_agrees_with_a_template_written_for_it_but_for_spaces(name: str):
    messages, tools = CONVERSATIONS[name]
    template = ChatTemplate(
        {"default": published()["llama.cpp/deepseek-ai-DeepSeek-V3.2"]},
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    )
    mine, other = (
        "".join(each.render(messages, tools=tools, kwargs={"thinking": True}).split())
        for each in (chat("deepseek_v32"), template)
    )
    thoughtless = "<think></think>"  # that template opens a thought in each of a turn's messages
    assert mine.replace(thoughtless, "").replace("</think>", "") == other.replace(thoughtless, "").replace(
        "</think>", ""
    )


def test_a_prompt_may_end_without_an_opened_answer_or_within_an_answer():
    template = chat("deepseek_v32")
    closed = template.render([USER], add_generation_prompt=False)
    assert closed.endswith(USER["content"])
    messages = [USER, {"role": "assistant", "content": "It is"}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<｜Assistant｜></think>It is")


@pytest.mark.parametrize(
    "messages",
    [
        [USER, RESULTS[0]],
        [USER, CALLED, RESULTS[0], USER],
        [{"role": "critic", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_what_the_family_cannot_read_is_the_clients_error(messages: list[dict[str, Any]]):
    with pytest.raises(InvalidRequest) as caught:
        chat("deepseek_v32").render(messages)
    assert str(caught.value.param).startswith("messages[")


def test_syntaxes_are_found_from_a_renderer_as_from_a_template():
    syntax = Syntax.choose(tokenizer(), chat("deepseek_v32"))
    assert syntax.tools is not None
    assert syntax.reasoning is not None
    prompt = chat("deepseek_v32").render([USER], tools=TOOLS, kwargs={"thinking": True})
    thought = syntax.thought(prompt)
    assert thought is not None
    assert thought.inside


def test_a_renderer_is_found_from_the_files_of_a_checkpoint_without_a_template(tmp_path: Path):
    assert renderers.choose("auto", tmp_path, has_template=False) is None
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv32.py").touch()
    found = renderers.RENDERERS["deepseek_v32"]
    assert renderers.choose("auto", tmp_path, has_template=False) is found
    assert renderers.choose("auto", tmp_path, has_template=True) is None
    assert renderers.choose("hf", tmp_path, has_template=False) is None
    assert renderers.choose("deepseek_v32", tmp_path / "none", has_template=True) is found
    with pytest.raises(ConfigError, match="grok2"):
        renderers.choose("grok2", tmp_path, has_template=True)
