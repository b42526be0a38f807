"""Renderers render what the families' own code renders, and refuse what it refuses."""

from __future__ import annotations

import json
import lzma
import random
import re
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest

from infd.errors import CheckpointError, ConfigError, InvalidRequest, TooCostly
from infd.text import answers, renderers
from infd.text.chat import ChatTemplate
from infd.text.checkpoint import TextFiles
from infd.text.effort import levels, nearest, switched
from infd.text.fuel import Limits
from infd.text.markup import Reading
from infd.text.renderers.harmony import HarmonyRenderer
from infd.text.syntax import Syntax
from infd.text.tokenizer import Tokenizer
from infd.text.tools.offered import Offered
from tests.http.model import tokenizer
from tests.text.renderers.conversations import (
    CALLED,
    CONVERSATIONS,
    HARMONY_CASES,
    HARMONY_DATE,
    ONE_CALL,
    RESULTS,
    TOOLS,
    USER,
)
from tests.text.renderers.record import EFFORTS, SCHEMAS, SETTINGS
from tests.text.templates import published
from tests.text.test_tool_syntaxes import drawn
from tests.text.transcripts import read

RECORDED = Path(__file__).parent / "renderers"
RECORDED_AT = datetime.combine(HARMONY_DATE, time())


VERSIONS = ["v3", "v7", "v11", "v13", "v15"]


def chat(name: str, directory: Path = RECORDED) -> ChatTemplate:
    return ChatTemplate.of_renderer(renderers.RENDERERS[name].load(directory))


def harmony() -> ChatTemplate:
    return ChatTemplate.of_renderer(HarmonyRenderer(lambda: RECORDED_AT))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return, by version of Mistral's rules, a directory with a tekken.json: the first tokens of a published one."""
    stored = json.loads(lzma.decompress((RECORDED / "tekken.json.xz").read_bytes()))
    found = {}
    for version in VERSIONS:
        found[version] = tmp_path_factory.mktemp(version)
        stored["config"]["version"] = version
        if version == "v15":
            stored["model_settings_builder"] = SETTINGS
        (found[version] / "tekken.json").write_text(json.dumps(stored))
    return found


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("case", recorded("deepseek_v32"))
def test_deepseek_v32_renders_like_its_own_encoding(case: str):
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


def files(directory: Path, template: str | None = None, **config: Any) -> TextFiles:
    """Return the files of a checkpoint. config: what config.json says."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return TextFiles.read(directory)


def test_a_renderer_is_found_from_the_files_of_a_checkpoint_without_a_template(tmp_path: Path):
    bare = files(tmp_path)
    assert renderers.choose("auto", bare) is None
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv32.py").touch()
    found = renderers.RENDERERS["deepseek_v32"]
    assert renderers.choose("auto", bare) is found
    assert renderers.choose("hf", bare) is None
    templated = files(tmp_path, "{{ messages }}")
    assert renderers.choose("auto", templated) is None
    assert renderers.choose("deepseek_v32", files(tmp_path / "none")) is found
    with pytest.raises(ConfigError, match="grok2"):
        renderers.choose("grok2", templated)


def test_harmony_replaces_the_template_that_gpt_oss_publishes(tmp_path: Path):
    template = published()["llama.cpp/openai-gpt-oss-120b"]
    found = renderers.RENDERERS["harmony"]
    assert renderers.choose("auto", files(tmp_path / "a", template, model_type="gpt_oss")) is found
    assert renderers.choose("hf", files(tmp_path / "a", template, model_type="gpt_oss")) is None
    assert renderers.choose("auto", files(tmp_path / "b", model_type="gpt_oss")) is found
    assert renderers.choose("auto", files(tmp_path / "c", template, model_type="llama")) is None
    assert renderers.choose("auto", files(tmp_path / "d", "{{ messages }}", model_type="gpt_oss")) is None
    assert renderers.choose("auto", files(tmp_path / "e", model_type=["gpt_oss"])) is None


@pytest.mark.parametrize("case", HARMONY_CASES)
def test_harmony_renders_like_openai_harmony(case: str):
    messages, tools, kwargs, continues = HARMONY_CASES[case]
    text = harmony().render(
        messages, tools=tools, kwargs=kwargs, add_generation_prompt=not continues, continue_final_message=continues
    )
    assert text == recorded("harmony")[case]


def test_harmony_describes_tools_as_openai_harmony_does():
    found = json.loads(lzma.decompress(SCHEMAS.read_bytes()))
    assert len(found) == 500
    for described, parameters, text in found:
        tool = {"type": "function", "function": {"name": "f", "description": described, "parameters": parameters}}
        assert text in harmony().render([USER], tools=[tool]), parameters


def test_the_recordings_of_harmony_drop_thoughts_before_the_last_final_answer_only():
    found = recorded("harmony")
    assert set(found) == set(HARMONY_CASES)
    assert "I look it up." not in found["thoughts"]
    assert "Again." in found["thoughts"]
    assert "I look it up." in found["calls of two rounds, with thoughts"]
    assert "print(1 < 2)" not in found["builtin calls before an answer"]
    assert "New." in found["a continued answer after a thought"]
    assert "Old." not in found["a continued answer after a thought"]


@pytest.mark.parametrize("case", ["one question", "several turns", "offered tools", "calls in two rounds"])
def test_harmony_agrees_with_the_published_template_except_for_its_known_differences(case: str):
    template = ChatTemplate({"default": published()["llama.cpp/openai-gpt-oss-120b"]}, {}, now=lambda: RECORDED_AT)
    messages, tools = CONVERSATIONS[case]
    own, other = (each.render(messages, tools=tools) for each in (harmony(), template))
    other = re.sub(r'(<\|message\|>)"(rain|sun)"', r"\1\2", other)  # a result as a JSON string
    other = other.replace("Always.\n\n<|end|>", "Always.<|end|>")  # no blank line ends instructions
    other = other.replace("// \ntype", "type")  # an empty description
    own = own.replace("(_: {\n}) => any", "() => any")  # no parameters
    assert own == other


def test_random_calls_that_harmony_writes_are_read_back():
    draw = random.Random(2)
    chat = harmony()
    for _ in range(200):
        several = []
        for number in range(draw.randrange(1, 4)):
            arguments = {key: drawn(draw) for key in draw.sample(["city", "days", "a_b", "x"], draw.randrange(4))}
            function = {"name": draw.choice(["weather", "get_all", "f-2"]), "arguments": arguments}
            several.append({"id": f"call_{number}", "type": "function", "function": function})
        said = {"role": "assistant", "reasoning_content": "Why?", "content": "I ask.", "tool_calls": several}
        text = chat.render([{"role": "user", "content": "q"}, said], add_generation_prompt=False)
        prompt, turn = text[: text.index("<|channel|>")], text[text.index("<|channel|>") :]
        found = read(Reading(answers.SYNTAXES["harmony"].start(prompt, "", Offered({"weather": b"{}"}))), [turn])
        assert (found.content, found.thought) == ("I ask.", "Why?")
        assert [(name, json.loads(written)) for name, written in found.calls] == [
            (each["function"]["name"], each["function"]["arguments"]) for each in several
        ]


@pytest.mark.parametrize(
    ("messages", "kwargs", "param"),
    [
        ([USER, RESULTS[0]], {}, "messages[1].tool_call_id"),
        ([{"role": "critic", "content": "x"}], {}, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content"),
        ([USER], {"reasoning_effort": "minimal"}, "reasoning_effort"),
        ([USER], {"builtin_tools": ["shell"]}, "chat_template_kwargs.builtin_tools"),
        ([USER], {"builtin_tools": "python"}, "chat_template_kwargs.builtin_tools"),
        ([USER], {"builtin_tools": [["python"]]}, "chat_template_kwargs.builtin_tools"),
        ([USER], {"model_identity": 1}, "chat_template_kwargs.model_identity"),
    ],
)
def test_what_harmony_cannot_write_is_the_clients_error(
    messages: list[dict[str, Any]], kwargs: dict[str, Any], param: str
):
    with pytest.raises(InvalidRequest) as caught:
        harmony().render(messages, kwargs=kwargs)
    assert caught.value.param == param


def test_efforts_of_harmony_are_those_that_the_model_knows():
    template = harmony()
    assert switched(template, on=True, effort="high", tools=False) == {"reasoning_effort": "high"}
    assert switched(template, on=False, effort=None, tools=False) == {}
    assert template.accepts({"reasoning_effort": "low"})
    assert not template.accepts({"reasoning_effort": "none"})
    assert levels(template, tools=False) == ["low", "medium", "high"]


@pytest.mark.parametrize(
    ("asked", "used"), [("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")]
)
def test_the_effort_nearest_to_one_that_harmony_does_not_know_is_one_that_it_knows(asked: str, used: str):
    assert nearest(harmony(), asked, tools=True) == {"reasoning_effort": used}


def test_a_template_without_efforts_has_no_nearest_one():
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    assert nearest(template, "low", tools=False) == {}


def test_types_of_tools_are_bounded():
    nested: dict[str, Any] = {}
    for _ in range(100):
        nested = {"type": "object", "properties": {"a": nested}}
    listed: dict[str, Any] = {}
    for _ in range(3000):
        listed = {"type": "array", "items": listed}
    variants: dict[str, Any] = {}
    for _ in range(3000):
        variants = {"oneOf": [variants]}
    for schema in (nested, variants):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(InvalidRequest, match="deeply"):
            harmony().render([USER], tools=[tool])
    tool = {"type": "function", "function": {"name": "f", "parameters": listed}}
    assert "any" + "[]" * 3000 in harmony().render([USER], tools=[tool])
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(100)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wide}}
    with pytest.raises(TooCostly):
        harmony().render([USER], tools=[tool], limits=Limits(output_characters=1000))
    assert "p99?: string" in harmony().render([USER], tools=[tool])


@pytest.mark.parametrize("version", VERSIONS)
def test_mistral_renders_and_encodes_like_mistral_common(checkpoints: dict[str, Path], version: str):
    tokenizer = Tokenizer.load(checkpoints[version])
    template = ChatTemplate.load(tokenizer)
    cases = recorded("mistral")[version]
    efforts = [None, *EFFORTS] if version == "v15" else [None]
    asked = {
        name if effort is None else f"{name}, {effort}": (name, effort) for name in CONVERSATIONS for effort in efforts
    }
    assert set(cases) == set(asked)
    for case, (name, effort) in asked.items():
        messages, tools = CONVERSATIONS[name]
        text = template.render(messages, tools=tools, kwargs={} if effort is None else {"reasoning_effort": effort})
        assert text == cases[case]["text"]
        assert tokenizer.encode(text, add_special_tokens=False) == cases[case]["ids"]
    assert ("[THINK]I look it up." in cases["thoughts"]["text"]) == (version in {"v13", "v15"})


def test_mistral_states_the_efforts_that_its_tekken_lists(checkpoints: dict[str, Path], tmp_path: Path):
    template = chat("mistral", checkpoints["v15"])
    assert switched(template, on=True, effort="high", tools=False) == {"reasoning_effort": "high"}
    assert switched(template, on=False, effort=None, tools=False) == {"reasoning_effort": "none"}
    assert template.accepts({"reasoning_effort": "high"})
    assert not template.accepts({"reasoning_effort": "medium"})
    assert "[MODEL_SETTINGS]" not in chat("mistral", checkpoints["v13"]).render(
        [USER], kwargs={"reasoning_effort": "high"}
    )
    stored = json.loads((checkpoints["v15"] / "tekken.json").read_text())
    for builder in (None, {}, {"reasoning_effort": None}):
        (tmp_path / "tekken.json").write_text(json.dumps(stored | {"model_settings_builder": builder}))
        silent = chat("mistral", tmp_path)
        assert "[MODEL_SETTINGS]" not in silent.render([USER])
        assert not silent.reads("reasoning_effort")


def test_tekken_encodes_and_decodes_like_mistral_common(checkpoints: dict[str, Path]):
    tokenizer = Tokenizer.load(checkpoints["v13"])
    for text, ids in recorded("mistral")["texts"].items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.end_ids == {tokenizer.id_of("</s>")}
    assert tokenizer.spellings() is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_and_thoughts_of_mistral_are_found_from_its_renderer(checkpoints: dict[str, Path], version: str):
    tokenizer = Tokenizer.load(checkpoints[version])
    syntax = Syntax.choose(tokenizer, ChatTemplate.load(tokenizer))
    assert (syntax.reasoning is not None) == (version in {"v13", "v15"})
    if version in {"v3", "v7"}:
        answer = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]'
    else:
        answer = '[TOOL_CALLS]f[ARGS]{"a": 1}'
    reading = syntax.start("", offered=Offered({"f": b""}))
    assert reading is not None
    assert not (reading.feed(answer) + reading.finish())
    aside = reading.take()
    assert aside is not None
    assert [(call.name, call.arguments) for call in aside.calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("version", "messages"),
    [
        ("v7", [USER, {**ONE_CALL, "tool_calls": [{**ONE_CALL["tool_calls"][0], "id": "call_1"}]}]),
        ("v11", [USER, {"role": "tool", "content": "x"}]),
        ("v3", [USER, {**ONE_CALL, "content": "I look."}]),
        ("v7", [USER, {"role": "assistant", "content": ""}, USER]),
        ("v13", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ],
)
def test_what_mistral_cannot_read_is_the_clients_error(
    checkpoints: dict[str, Path], version: str, messages: list[dict[str, Any]]
):
    with pytest.raises(InvalidRequest) as caught:
        chat("mistral", checkpoints[version]).render(messages)
    assert str(caught.value.param).startswith("messages[")


def test_a_malformed_tekken_is_refused_by_name(tmp_path: Path, checkpoints: dict[str, Path]):
    with pytest.raises(ConfigError, match="tekken"):
        renderers.choose("mistral", files(tmp_path))
    stored = json.loads((checkpoints["v7"] / "tekken.json").read_text())
    stored["config"]["version"] = "v99"
    (tmp_path / "tekken.json").write_text(json.dumps(stored))
    assert renderers.choose("auto", files(tmp_path)) is None
    with pytest.raises(ConfigError, match="v99"):
        renderers.choose("mistral", files(tmp_path))
    for wrong in ({"vocab": []}, {"vocab": stored["vocab"][:300] * 2}, {"config": {}}, {"vocab": "x"}):
        (tmp_path / "tekken.json").write_text(json.dumps(stored | wrong))
        with pytest.raises(CheckpointError, match="tekken"):
            Tokenizer.load(tmp_path)
    for malformed in (b"", b'{"config": "\xff"}', b'{"a": ' + b"[" * 100_000):
        (tmp_path / "tekken.json").write_bytes(malformed)
        with pytest.raises(CheckpointError, match="tekken"):
            Tokenizer.load(tmp_path)
