"""Every syntax of thoughts in the registry: equal results however an answer arrives, and no text is lost."""

from __future__ import annotations

import random

import pytest

from infd.text import reasoning
from infd.text.chat import ChatTemplate
from infd.text.markup import Reading
from infd.text.syntax import Syntax
from infd.text.tools.families_json import HERMES
from infd.text.tools.offered import Offered
from tests.text.templates import published
from tests.text.transcripts import Message, cuts, read
from tests.text.vocabularies import byte_level, wrap

ASKED = "user: hi\nassistant: "
TOKENIZER = wrap(byte_level())
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CHOSEN = {
    "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "llama.cpp/ByteDance-Seed-OSS": "seed_oss",
    "llama.cpp/MiniMax-M3": "minimax_m3",
    "llama.cpp/Cohere2MoE": "cohere_command3",
    "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command3",
    "llama.cpp/google-gemma-4-31B-it-interleaved": "gemma4",
    "llama.cpp/Apriel-1.6-15b-Thinker-fixed": "apriel",
    "llama.cpp/Qwen-Qwen3-0.6B": "qwen3",
    "llama.cpp/Qwen3.5-4B": "qwen3",
    "llama.cpp/GLM-4.7-Flash": "qwen3",
    "llama.cpp/MiniMax-M2": "qwen3",
    "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3",
    "llama.cpp/StepFun3.5-Flash": "qwen3",
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "qwen3",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1": "qwen3",
    "llama.cpp/Kimi-K2-Thinking": "qwen3",
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct": None,
    "llama.cpp/Qwen-Qwen2.5-7B-Instruct": None,
}
# Prompts, rendered without variables, whose end opens a thought, or closes one because thinking is off.
OPENED = {
    *("llama.cpp/Cohere2MoE", "llama.cpp/Apriel-1.6-15b-Thinker-fixed", "llama.cpp/Qwen3.5-4B"),
    *("llama.cpp/GLM-4.7-Flash", "llama.cpp/MiniMax-M2", "llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    *("llama.cpp/StepFun3.5-Flash", "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B"),
}
CLOSED = {
    *("llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use", "llama.cpp/google-gemma-4-31B-it-interleaved"),
    "llama.cpp/deepseek-ai-DeepSeek-V3.1",
}


def start(name: str, prompt: str = ASKED) -> Reading:
    return Reading(reasoning.SYNTAXES[name].start(prompt, ""))


@pytest.mark.parametrize("name", reasoning.SYNTAXES)
def test_a_thought_is_the_same_however_it_arrives(name: str):
    thought = reasoning.SYNTAXES[name].thought(ASKED, "")
    assert thought is not None
    opening, closing = thought.opening, thought.closing
    transcripts = [
        (ASKED, f"{opening}\na < b é\n{closing}\n\nFour.", Message("Four.", "a < b é")),
        (ASKED, f"\n{opening}{closing}Four.", Message("Four.")),
        (ASKED, "Four < five [six].", Message("Four < five [six].")),
        (ASKED, f"{opening}cut", Message("", "cut")),
        (f"{ASKED}{opening}\n", f"Hm.\n{closing}Four.", Message("Four.", "Hm.")),
        (f"{ASKED}{opening}\n", f"Hm.{closing[:-1]}", Message("", f"Hm.{closing[:-1]}")),
        (f"{ASKED}{opening}", f"Hm.{closing}a{opening}b{closing}", Message(f"a{opening}b{closing}", "Hm.")),
    ]
    for prompt, answer, message in transcripts:
        for parts in cuts(answer):
            assert read(start(name, prompt), parts) == message, parts
    assert reasoning.SYNTAXES[name].thought(f"{ASKED}{opening}\n\n{closing}\n\n", "") is None


@pytest.mark.parametrize("name", reasoning.SYNTAXES)
def test_soups_of_marks_are_the_same_message_however_they_arrive_and_no_word_is_lost(name: str):
    marks = reasoning.SYNTAXES[name].marks
    pieces = [*marks, *(mark[: len(mark) // 2] for mark in marks), "\n", " ", "a", "é", "<", "[", "<tool_call>", "{"]
    draw = random.Random(name)
    for number in range(400):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        prompt = ASKED + draw.choice(["", marks[0]])
        ends = draw.choice([(), ("<tool_call>",)])
        made = [reasoning.SYNTAXES[name].start(prompt, "", ends) for _ in range(2)]
        whole = read(Reading(made[0]), [text])
        assert read(Reading(made[1]), list(text)) == whole, (number, text)
        kept = whole.thought + whole.content
        assert text.count("é") == kept.count("é"), text


@pytest.mark.parametrize("name", reasoning.SYNTAXES)
def test_a_call_after_a_thought_that_is_closed_or_left_open_is_a_call(name: str):
    syntax = Syntax(reasoning.SYNTAXES[name], HERMES)
    thought = syntax.thought(ASKED)
    assert thought is not None
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for closing in ("\n", thought.closing, f"\n{thought.closing}\n\n"):
        for parts in cuts(f"{thought.opening}Hm.{closing}{call}"):
            reading = syntax.start(ASKED, offered=Offered({"f": b""}))
            assert reading is not None
            assert read(reading, parts) == Message("", "Hm.", (("f", "{}"),))


@pytest.mark.parametrize("template", CHOSEN)
def test_the_syntax_of_a_published_template_is_found(template: str):
    chat = ChatTemplate({"default": published()[template]}, VARIABLES)
    syntax = Syntax.choose(TOKENIZER, chat)
    found = next((name for name, known in reasoning.SYNTAXES.items() if known is syntax.reasoning), None)
    assert found == CHOSEN[template]
    if found is None or template == "llama.cpp/Kimi-K2-Thinking":
        return
    thought = syntax.thought(chat.render([{"role": "user", "content": "hi"}]))
    assert (thought is None) == (template in CLOSED)
    assert thought is None or thought.inside == (template in OPENED)
