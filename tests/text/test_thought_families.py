"""Every family's thoughts are read and forced, and found out from the published templates."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from infd.constraint import AfterThought, Regex, Thought
from infd.grammar.protocol import Limits, Vocabulary
from infd.text.chat import ChatTemplate, Compiled
from infd.text.fuel import Limits as TemplateLimits
from infd.text.markup import Reading
from infd.text.reasoning import ALIASES, SYNTAXES
from infd.text.reasoning.blocks import FAMILIES
from infd.text.syntax import PROMPT_END, Syntax, check_names
from infd.text.tools.families_json import HERMES
from infd.text.tools.offered import Offered
from tests.grammar import engines
from tests.grammar.vocabularies import walk
from tests.text.templates import published
from tests.text.transcripts import Message, cuts, read
from tests.thorough import among

if TYPE_CHECKING:
    from infd.text.reasoning.blocks import Block

# Looked through by hand. Templates that are not named here have no thoughts, or one of these: channels of whole answers
# (gpt-oss, muse, Solar); a model that thinks unprompted, of which its template says nothing (MiMo-VL).
PUBLISHED = {
    "apertus": {"llama.cpp/Apertus-8B-Instruct", "vllm/apertus"},
    "apriel": {"llama.cpp/Apriel-1.6-15b-Thinker-fixed", "llama.cpp/unsloth-Apriel-1.5"},
    "cohere_command3": {"llama.cpp/Cohere2MoE", "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use"},
    "gemma4": {
        "llama.cpp/google-gemma-4-31B-it",
        "llama.cpp/google-gemma-4-31B-it-interleaved",
        "vllm/gemma4",
    },
    "granite": {"granite-common/granite-3.2"},
    "granite33": {"llama.cpp/ibm-granite-granite-3.3-2B-Instruct"},
    "hunyuan_a13b": {"vllm/hunyuan_a13b"},
    "hy_v3": {"llama.cpp/tencent-Hy3"},
    "kimi_k3": {"llama.cpp/Kimi-K3"},
    "minimax_m3": {"llama.cpp/MiniMax-M3"},
    "mistral": {"llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512"},
    "seed_oss": {"llama.cpp/ByteDance-Seed-OSS"},
    "qwen3": {
        "axolotl/exaone4",
        "llama.cpp/Bielik-11B-v3.0-Instruct",
        "llama.cpp/GLM-4.6",
        "llama.cpp/GLM-4.7-Flash",
        "llama.cpp/HuggingFaceTB-SmolLM3-3B",
        "llama.cpp/Kimi-K2-Thinking",
        "llama.cpp/LFM2.5-8B-A1B",
        "llama.cpp/LFM2.5-Instruct",
        "llama.cpp/MiniMax-M2",
        "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "llama.cpp/NVIDIA-Nemotron-Nano-v2",
        "llama.cpp/Qwen-QwQ-32B",
        "llama.cpp/Qwen-Qwen3-0.6B",
        "llama.cpp/Qwen3.5-4B",
        "llama.cpp/Reka-Edge",
        "llama.cpp/Spark2.5",
        "llama.cpp/StepFun3.5-Flash",
        "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "llama.cpp/deepseek-ai-DeepSeek-V3.1",
        "llama.cpp/deepseek-ai-DeepSeek-V3.2",
        "llama.cpp/deepseek-ai-DeepSeek-V4",
        "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731",
        "llama.cpp/inclusionai-ling-3.0-flash",
        "llama.cpp/llama-cpp-deepseek-r1",
        "llama.cpp/llama-cpp-rwkv-world",
        "llama.cpp/openbmb-MiniCPM5-1B",
        "llama.cpp/poolside-Laguna-S-2.1",
        "llama.cpp/poolside-Laguna-XS-2.1",
        "llama.cpp/poolside-Laguna-XS.2",
        "vllm/deepseekr1",
        "open-instruct/olmo_thinker",
        "vllm/deepseekv31",
        "xinference/GLM-5.2",
        "xinference/Kimi-K2.5",
        "xinference/MiniMax-M2.5",
    },
}


def found(source: str) -> str | None:
    template = ChatTemplate({"default": source})
    return next((name for name, syntax in SYNTAXES.items() if syntax.matches(template)), None)


def test_every_published_template_has_the_thoughts_of_its_family():
    expected = {template: name for name, templates in PUBLISHED.items() for template in templates}

    assert {name: found(source) for name, source in published().items()} == {
        name: expected.get(name) for name in published()
    }


@pytest.mark.parametrize(
    ("template", "variables", "inside"),
    [
        ("llama.cpp/Qwen-Qwen3-0.6B", {}, False),
        ("llama.cpp/Qwen-Qwen3-0.6B", {"enable_thinking": False}, None),
        ("llama.cpp/Qwen3.5-4B", {}, True),
        ("llama.cpp/Qwen3.5-4B", {"enable_thinking": False}, None),
        ("llama.cpp/GLM-4.6", {}, False),
        ("llama.cpp/GLM-4.6", {"enable_thinking": False}, None),
        ("llama.cpp/GLM-4.7-Flash", {}, True),
        ("llama.cpp/GLM-4.7-Flash", {"enable_thinking": False}, None),
        ("llama.cpp/deepseek-ai-DeepSeek-V3.1", {"thinking": True}, True),
        ("llama.cpp/deepseek-ai-DeepSeek-V3.1", {}, None),
        ("llama.cpp/MiniMax-M2", {}, True),
        ("llama.cpp/Kimi-K3", {}, True),
        ("llama.cpp/Kimi-K3", {"thinking": False}, None),
        ("llama.cpp/MiniMax-M3", {}, False),
        ("llama.cpp/MiniMax-M3", {"thinking_mode": "enabled"}, True),
        ("llama.cpp/MiniMax-M3", {"thinking_mode": "disabled"}, None),
        ("llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}, True),
        ("llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"enable_thinking": False}, None),
        ("llama.cpp/ByteDance-Seed-OSS", {}, False),
        ("llama.cpp/ByteDance-Seed-OSS", {"thinking_budget": 0}, None),
        ("llama.cpp/Cohere2MoE", {}, True),
        ("llama.cpp/Cohere2MoE", {"reasoning_effort": "none"}, None),
        ("llama.cpp/google-gemma-4-31B-it", {"enable_thinking": True}, False),
        ("llama.cpp/google-gemma-4-31B-it", {}, None),
        ("llama.cpp/tencent-Hy3", {"reasoning_effort": "high"}, True),
        ("llama.cpp/tencent-Hy3", {}, None),
        ("llama.cpp/Apriel-1.6-15b-Thinker-fixed", {}, True),
        ("llama.cpp/ibm-granite-granite-3.3-2B-Instruct", {"thinking": True}, False),
        ("llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512", {}, False),
        ("vllm/hunyuan_a13b", {"enable_thinking": False}, None),
    ],
)
def test_the_prompt_decides_whether_an_answer_holds_a_thought(template: str, variables: dict, inside: bool | None):
    source = published()[template]
    values = {"messages": [{"role": "user", "content": "q"}], "add_generation_prompt": True, **variables}
    prompt = Compiled(source).render({"bos_token": "", "eos_token": "", **values}, TemplateLimits())
    name = found(source)
    assert name is not None
    thought = SYNTAXES[name].thought(prompt[-PROMPT_END:], "")

    assert (None if thought is None else thought.inside) == inside


ANSWERED = {
    "granite33": "<think>a</think><response>Four.</response>",
    "ernie45": "<think>\na\n</think>\n\n<response>\nFour.\n</response>\n",
    "hunyuan_a13b": "<think>\na\n</think>\n<answer>\nFour.\n</answer>",
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.histories
def test_a_transcript_is_the_same_message_wherever_it_is_cut(name: str):
    family = FAMILIES[name]
    for opening, closing in ((family.opening, family.closing), *family.variants):
        inside = "Two < [two.\nOr <|four?"
        expected = Message("Four </b>.", inside)
        for prompt, text in (("", opening + "\n"), (f"<|assistant|>{opening}\n", "")):
            whole = f"{text}{inside}\n{closing}\n\nFour </b>."
            for parts in cuts(whole):
                assert read(Reading(family.start(prompt, "")), parts) == expected, parts
        for parts in cuts("No mark came."):
            assert read(Reading(family.start("<|assistant|>", "")), parts) == Message("No mark came.")
        for parts in cuts(f"{closing}\nFour."):
            assert read(Reading(family.start("<|assistant|>", "")), parts) == Message("Four.")
        parser = family.start(f"<|assistant|>{opening}{closing}", "")
        assert (parser is None) == (not family.answer)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.histories
def test_an_answer_has_one_thought_which_may_be_cut(name: str):
    family = FAMILIES[name]
    opening, closing = family.opening, family.closing
    for prompt, answer, message in (
        ("<|assistant|>", f"{opening}cut", Message("", "cut")),
        (opening, f"Hm.{closing[:-1]}", Message("", f"Hm.{closing[:-1]}")),
        (opening, f"Hm.{closing}a{opening}b{closing}", Message(f"a{opening}b{closing}", "Hm.")),
    ):
        for parts in cuts(answer):
            assert read(Reading(family.start(prompt, "")), parts) == message, parts
    assert family.thought(f"<|assistant|>{opening}\n\n{closing}\n\n", "") is None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_after_a_thought_that_is_closed_or_left_open_is_a_call(name: str):
    syntax = Syntax(FAMILIES[name], HERMES)
    thought = syntax.thought("<|assistant|>")
    assert thought is not None
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for closing in ("\n", thought.closing, f"\n{thought.closing}\n\n"):
        answer = f"{thought.opening}Hm.{closing}{call}"
        for parts in (list(answer), *([answer[:place], answer[place:]] for place in range(len(answer)))):
            reading = syntax.start("<|assistant|>", offered=Offered({"f": b""}))
            assert reading is not None
            assert read(reading, parts) == Message("", "Hm.", (("f", "{}"),))


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.histories
def test_the_marks_around_an_answer_are_no_content(name: str):
    family, text = FAMILIES[name], ANSWERED[name]
    for parts in cuts(text):
        assert read(Reading(family.start("", "")), parts) == Message("Four.", "a"), parts
    after = text[text.index(family.closing) + len(family.closing) :]
    closed = f"{family.opening}\n\n{family.closing}"
    for parts in cuts(after):
        assert read(Reading(family.start(closed, "")), parts) == Message("Four.")
    opening, closing = family.answer
    several = f"{opening}a{closing} b\n{closing}"
    for parts in cuts(several):
        assert read(Reading(family.start(closed, "")), parts) == Message(f"a{closing} b")
    assert read(Reading(family.start(closed, "")), ["Four", f".{closing}"]) == Message(f"Four.{closing}")
    assert read(Reading(family.start(closed, "")), [opening[:3]]) == Message(opening[:3])
    assert read(Reading(family.start(closed, "")), [f"{opening}a", closing[:3]]) == Message(f"a{closing[:3]}")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.answer])
@pytest.mark.histories
def test_an_answer_that_the_prompt_has_opened_loses_its_closing_mark(name: str):
    family = FAMILIES[name]
    prompt = f"<|assistant|>{family.answer[0]}"
    assert family.thought(prompt, "") is None
    for parts in cuts(f"Four.\n{family.answer[1]}"):
        assert read(Reading(family.start(prompt, "")), parts) == Message("Four.")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.histories
def test_random_marks_lose_no_text(name: str):
    family, draw = FAMILIES[name], random.Random(1)
    words = [family.opening, family.closing, *family.answer, family.opening[:2], family.closing[1:], "\n", "ab", "é"]
    words += [*family.marks, *(mark[: len(mark) // 2] for mark in family.marks), " ", "<", "["]
    for _ in range(among(50, 100, 200)):
        text = "".join(draw.choices(words, k=draw.randint(0, 9)))
        for prompt in ("", family.opening, family.closing):
            parser = family.start(prompt, "")
            if parser is not None:
                whole = read(Reading(parser), [text])
                assert read(Reading(family.start(prompt, "")), list(text)) == whole
                called = f"{text}\n<tool_call>{text}"
                ended = [
                    read(Reading(family.start(prompt, "", ["<tool_call>"])), parts) for parts in ([called], called)
                ]
                assert ended[0] == ended[1]
                assert "<tool_call>" in ended[0].content
                returned = bare(whole.thought + whole.content, family)
                assert returned == bare(text, family)


def bare(text: str, family: Block) -> str:
    """Return the letters that are part of no mark: what no parser may drop."""
    return "".join(character for character in text if character in "bé" and character not in "".join(marks_of(family)))


def marks_of(family: Block) -> tuple[str, ...]:
    return (family.opening, family.closing, *family.answer)


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_constraint_begins_after_the_thought(name: str, spelled: bool, inside: bool):
    family = FAMILIES[name]
    marks = () if spelled else tuple(dict.fromkeys(family.marks))
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, marks), b"<end>"]
    special = frozenset(range(256, len(pieces)))
    vocabulary = Vocabulary(pieces, special, frozenset({len(pieces) - 1}), len(pieces), lambda text: [], False)
    compiler = engines.compiler(vocabulary)
    thought = family.thought(family.opening if inside else "<|assistant|>", "")
    assert isinstance(thought, Thought)
    matcher = compiler.compile(AfterThought(thought, Regex("[0-9]{3}")), Limits()).matcher()

    def tokens(text: str) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            mark = next((mark for mark in marks if text.startswith(mark, place)), None)
            ids += [256 + marks.index(mark)] if mark is not None else list(text[place].encode())
            place += len(mark or text[place])
        return ids

    matcher.advance(tokens(("" if inside else family.opening) + "\nabc\n" + family.closing + "\n\n"))
    answer = walk(compiler, matcher, random.Random(1), 9, ends=1.0)

    assert bytes(answer[:-1]).decode().isdecimal()
    assert len(answer) == 4


def test_names_of_other_servers_are_known():
    for name in (*ALIASES, "identity", "deepseek_r1", "granite", "kimi_k2", "cohere_command3"):
        check_names(reasoning_name=name, tools_name="none")
        assert ALIASES.get(name, name) in {*SYNTAXES, "none"}
