"""Thoughts over sockets under published templates, one or two of each family."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Struct

from infd.text.chat import ChatTemplate
from infd.text.markup import Reading
from infd.text.syntax import Syntax
from tests.http.model import tokenizer
from tests.http.test_thinking import CHAT, asked, streamed, thinker
from tests.text.templates import published
from tests.text.transcripts import Message, read

if TYPE_CHECKING:
    from infd.constraint import Thought

QUESTION = [{"role": "user", "content": "Why?"}]
THOUGHT = "Let me see, there is much to say about that."
ALWAYS = 400  # status of a request that switches off thoughts which the template cannot


class Case(Struct):
    """A template, and the thoughts that its prompts begin.

    on      request fields that switch thoughts on; empty: they are on
    inside  whether the prompt then opens the thought
    off     end of the prompt when thoughts are switched off; ALWAYS: refused; empty: the prompt's end stays
    """

    template: str
    inside: bool
    on: dict[str, Any] = {}
    off: str | int = ""


CASES = {
    "apertus": Case("llama.cpp/Apertus-8B-Instruct", inside=False),
    "apriel": Case("llama.cpp/Apriel-1.6-15b-Thinker-fixed", inside=True, off=ALWAYS),
    "cohere 4": Case("llama.cpp/Cohere2MoE", inside=True, off="<|START_THINKING|><|END_THINKING|>"),
    "cohere r7b": Case(
        "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        inside=False,
        on={"enable_thinking": True},
        off="<|START_THINKING|><|END_THINKING|>",
    ),
    "deepseek r1": Case("llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B", inside=True, off=ALWAYS),
    "deepseek v3.1": Case(
        "llama.cpp/deepseek-ai-DeepSeek-V3.1", inside=True, on={"thinking": True}, off="<think></think>"
    ),
    "deepseek v4": Case("llama.cpp/deepseek-ai-DeepSeek-V4", inside=True, on={"enable_thinking": True}, off="</think>"),
    "gemma4": Case(
        "llama.cpp/google-gemma-4-31B-it",
        inside=False,
        on={"enable_thinking": True},
        off="<|channel>thought\n<channel|>",
    ),
    "glm45": Case("llama.cpp/GLM-4.6", inside=False, off="<think></think>"),
    "glm5": Case("xinference/GLM-5.2", inside=True, off="<think></think>"),
    "gpt-oss": Case("llama.cpp/openai-gpt-oss-120b", inside=False, off=ALWAYS),
    "granite 3.2": Case("granite-common/granite-3.2", inside=False, on={"thinking": True}),
    "granite 3.3": Case("llama.cpp/ibm-granite-granite-3.3-2B-Instruct", inside=False, on={"thinking": True}),
    "hunyuan": Case("vllm/hunyuan_a13b", inside=False, off="<think>\n\n</think>\n"),
    "hunyuan 3": Case("llama.cpp/tencent-Hy3", inside=True, on={"enable_thinking": True}, off="</think:opensource>"),
    "kimi k2": Case("llama.cpp/Kimi-K2-Thinking", inside=False),
    "kimi k2.5": Case("xinference/Kimi-K2.5", inside=True, off="<think></think>"),
    "kimi k3": Case("llama.cpp/Kimi-K3", inside=True, off="<|open|>response<|sep|>"),
    "minimax m2": Case("xinference/MiniMax-M2.5", inside=True, off=ALWAYS),
    "minimax m3": Case("llama.cpp/MiniMax-M3", inside=False, off="</mm:think>"),
    "mistral": Case("llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512", inside=False),
    "nemotron 2": Case("llama.cpp/NVIDIA-Nemotron-Nano-v2", inside=True, off="<think></think>"),
    "nemotron 3": Case("llama.cpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", inside=True, off="<think></think>"),
    "olmo3": Case("open-instruct/olmo_thinker", inside=True, off=ALWAYS),
    "qwen3": Case("llama.cpp/Qwen-Qwen3-0.6B", inside=False, off="<think>\n\n</think>\n\n"),
    "qwen3.5": Case("llama.cpp/Qwen3.5-4B", inside=True, off="<think>\n\n</think>\n\n"),
    "seed_oss": Case("llama.cpp/ByteDance-Seed-OSS", inside=False),
    "step 3.5": Case("llama.cpp/StepFun3.5-Flash", inside=True, off=ALWAYS),
}


@cache
def chosen(template: str) -> Syntax:
    return Syntax.choose(tokenizer(), ChatTemplate({"default": published()[template]}))


def syntax(case: Case) -> Syntax:
    return chosen(case.template)


def marks(case: Case) -> Thought:
    """Return the marks of a thought that the model opens."""
    thought = syntax(case).thought("")
    assert thought is not None
    return thought


@pytest.mark.parametrize("name", CASES)
async def test_a_family_thinks_counts_its_thoughts_and_ends_them_at_their_budget(name: str):
    case = CASES[name]
    thought = marks(case)
    opened = "" if case.inside else thought.opening
    header = "<|start|>assistant<|channel|>final<|message|>" if name == "gpt-oss" else ""
    answer = f"{opened}{THOUGHT}{thought.closing}{header}Because."
    async with thinker(answer, template=published()[case.template]) as endpoint:
        body = await asked(endpoint, **case.on)
        message, details = body["choices"][0]["message"], body["usage"]["completion_tokens_details"]
        assert (message["reasoning"], message["content"]) == (THOUGHT, "Because.")
        assert len(THOUGHT) <= details["reasoning_tokens"] <= len(answer.encode()) - len("Because.")
        assert await streamed(endpoint, **case.on) == (THOUGHT, "Because.")

        body = await asked(endpoint, thinking_token_budget=9, **case.on)
        message, details = body["choices"][0]["message"], body["usage"]["completion_tokens_details"]
        assert message["reasoning"] == "Let me se"
        assert message["content"]
        assert details["reasoning_tokens"] <= len(opened) + 9 + len(thought.closing)


@pytest.mark.parametrize("name", CASES)
async def test_content_is_never_lost_in_a_thought_that_was_not_opened(name: str):
    case = CASES[name]
    answer = f"{THOUGHT} {THOUGHT}"  # longer than the marks that a budget of 0 forces
    off = {"thinking_token_budget": 0} if case.off == ALWAYS else {"enable_thinking": False}
    async with thinker(answer, template=published()[case.template]) as endpoint:
        message = (await asked(endpoint, **off))["choices"][0]["message"]
        assert not message.get("reasoning")
        assert message["content"]
        assert answer.endswith(message["content"]) if case.off == ALWAYS else message["content"] == answer
        if not case.inside:
            body = await asked(endpoint, **case.on)
            assert body["choices"][0]["message"]["content"] == answer
            assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize("name", CASES)
async def test_thoughts_are_switched_on_and_off_by_the_family_s_own_means(name: str):
    case = CASES[name]
    async with thinker("", template=published()[case.template]) as endpoint:
        body = (await endpoint.post(f"{CHAT}/render", {"messages": QUESTION, **case.on}))[1]
        thought = syntax(case).thought(body["prompt"])
        assert thought is not None
        assert thought.inside == case.inside
        off, refusal = {"messages": QUESTION, "enable_thinking": False}, case.off == ALWAYS
        status, body = await endpoint.post(f"{CHAT}/render", off)
        assert status == (ALWAYS if refusal else 200), body
        if not refusal:
            assert body["prompt"].endswith(str(case.off))


def test_no_parser_of_thoughts_leaves_the_marks_in_the_content():
    for name, case in CASES.items():
        template = ChatTemplate({"default": published()[case.template]})
        plain = Syntax.choose(tokenizer(), template, reasoning_name="identity", tools_name="none")
        assert not plain.reads_thoughts, name
        assert plain.start("") is None
    parser = syntax(CASES["qwen3"]).start("")
    assert isinstance(parser, Reading)
    assert read(parser, ["<think>a</think>b"]) == Message("b", "a")
