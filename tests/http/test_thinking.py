"""Thoughts over sockets: their budget, effort and switch, under the names of several servers."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from infd.errors import InvalidRequest
from infd.grammar.protocol import Vocabulary
from infd.grammar.service import GrammarService
from infd.http.apis.chat import CHAT as API
from infd.http.json_body import decode
from infd.http.thinking import Thinking, thinking
from infd.offload import Offload
from infd.telemetry.metrics import Metrics
from tests.fakes import VOCAB
from tests.grammar import engines
from tests.grammar.engines import Untried
from tests.http.model import TEMPLATE, tokenizer
from tests.http.scripted import speaking
from tests.text.templates import TEMPLATES, published

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.endpoint import Endpoint

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Why?"}]
LONG = "<think>\nLet me see, there is much to say about that.\n</think>\n\nBecause."
ALWAYS = "{{ messages[0].content }}<|im_end|>assistant\n<think>\n{# the model closes it: </think> #}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@asynccontextmanager
async def thinker(*answers: str, template: str = TEMPLATES["qwen3"]) -> AsyncIterator[Endpoint]:
    """Run an endpoint with real grammars, whose choices generate `answers` where no mask prevents that."""
    offload = Offload()
    spellings = tokenizer().spellings()
    assert spellings is not None
    words = Vocabulary(spellings, tokenizer().special_ids, tokenizer().end_ids, VOCAB, lambda text: [])
    grammars = GrammarService(engines.config(), offload, Untried(), Metrics())
    grammars.serve(lambda: words)
    try:
        async with speaking(*answers, template=template, grammars=grammars) as endpoint:
            yield endpoint
    finally:
        offload.close()


async def asked(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    status, body = await endpoint.post(CHAT, {"messages": USER, "seed": 0, **fields})
    assert status == 200, body
    return body


async def streamed(endpoint: Endpoint, **fields: Any) -> tuple[str, str]:
    """Return the thought and the content of a streamed answer."""
    events = await endpoint.events(CHAT, {"messages": USER, "seed": 0, **fields})
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(d.get("reasoning") or "" for d in deltas), "".join(d.get("content") or "" for d in deltas)


BUDGETS: list[dict[str, Any]] = [
    {"thinking_token_budget": 9},
    {"thinking_budget": 9},
    {"thinking_budget_tokens": 9},
    {"thinking": {"type": "enabled", "budget_tokens": 9}},
    {"reasoning": {"max_tokens": 9}},
    {"chat_template_kwargs": {"thinking_budget": 9}},
    {"chat_template_kwargs": {"thinking_token_budget": 9}},
]


async def test_a_thought_ends_at_its_budget_under_every_name():
    async with thinker(LONG) as endpoint:
        for fields in BUDGETS:
            body = await asked(endpoint, **fields)
            (choice,) = body["choices"]
            assert choice["message"]["reasoning"] == "Let me s"  # a newline precedes
            details = body["usage"]["completion_tokens_details"]
            assert 9 < details["reasoning_tokens"] <= len("<think>") + 9 + len("</think>")
            assert await streamed(endpoint, **fields) == ("Let me s", choice["message"]["content"])
        for budget in (-1, 500):
            (choice,) = (await asked(endpoint, thinking_token_budget=budget))["choices"]
            assert choice["message"]["content"] == "Because."


async def test_a_budget_of_zero_leaves_no_thought():
    for template, answer in ((TEMPLATES["qwen3"], LONG), (ALWAYS, LONG.removeprefix("<think>\n"))):
        async with thinker(answer, template=template) as endpoint:
            body = await asked(endpoint, thinking_token_budget=0)
        assert not body["choices"][0]["message"].get("reasoning")
        assert body["choices"][0]["message"]["content"]


async def test_each_choice_has_a_budget_of_its_own_and_content_is_free():
    plain = "It is a long answer without a thought."
    async with thinker(LONG, plain) as endpoint:
        first, second = (await asked(endpoint, thinking_token_budget=9, n=2))["choices"]
    assert first["message"]["reasoning"] == "Let me s"
    assert second["message"]["content"] == plain


async def test_a_budget_beside_constraints_and_forced_calls():
    async with thinker(LONG) as endpoint:
        (choice,) = (await asked(endpoint, thinking_token_budget=9, guided_choice=["yes", "no"]))["choices"]
        assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Let me s", "stop")
        assert choice["message"]["content"] in {"yes", "no"}
        forced = {"tools": [WEATHER], "tool_choice": "required", "thinking_token_budget": 9, "max_tokens": 400}
        (choice,) = (await asked(endpoint, **forced, parallel_tool_calls=False))["choices"]
        assert choice["message"]["reasoning"] == "Let me s"
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_a_constrained_answer_begins_with_the_header_of_the_family():
    closing, header = "<|close|>think<|sep|>", "<|open|>response<|sep|>"
    async with thinker(f"Hm.{closing}{header}yes", template=published()["llama.cpp/Kimi-K3"]) as endpoint:
        body = await asked(endpoint, guided_choice=["yes", "no"])
        assert body["choices"][0]["message"]["content"] == "yes"
    async with thinker(f"Hm.{closing}no, not so", template=published()["llama.cpp/Kimi-K3"]) as endpoint:
        body = await asked(endpoint, guided_choice=["yes", "no"])
        message = body["choices"][0]["message"]
        assert (message["reasoning"], message["content"] in {"yes", "no"}) == ("Hm.", True)
        written = f"Hm.{closing}{header}{message['content']}"
        assert body["usage"]["completion_tokens"] > len(written)


async def test_a_call_written_within_the_thought_is_not_cut_by_the_budget():
    call = '<think>\nI call:\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    async with thinker(call) as endpoint:
        (choice,) = (await asked(endpoint, tools=[WEATHER], thinking_token_budget=22))["choices"]
    assert choice["message"]["reasoning"] == "I call:"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


async def test_a_budget_without_effect_is_accepted():
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with thinker("Because.") as endpoint:
        (choice,) = (await asked(endpoint, thinking_token_budget=2, **off))["choices"]
    assert choice["message"]["content"] == "Because."


async def test_a_model_without_thoughts_refuses_a_budget_by_name():
    async with speaking("", template=TEMPLATES["llama3"]) as endpoint:
        for fields in BUDGETS[:4]:
            status, body = await endpoint.post(CHAT, {"messages": USER, **fields})
            assert (status, body["error"]["code"]) == (400, "unsupported")
            assert body["error"]["param"].startswith(next(iter(fields)))


def read(**fields: Any) -> Thinking:
    body = {"messages": USER, **fields}
    return thinking(decode(json.dumps(body).encode(), API.decoder, 128))


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 1, "thinking_budget": 2},
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
        {"reasoning_effort": "low", "enable_thinking": False},
        {"reasoning_effort": "none", "thinking": True},
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="contradict") as caught:
        read(**fields)
    assert str(caught.value.param).partition(".")[0] in fields


SWITCHED: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"enable_thinking": False},
    {"thinking": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"thinking_mode": "disabled"}},
]
# Templates with another switch, or none, and the end of a prompt whose thoughts are switched off.
OFF = {
    "llama.cpp/Qwen-Qwen3-0.6B": "<think>\n\n</think>\n\n",
    "llama.cpp/GLM-4.6": "\n<think></think>",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1": "</think>",
    "llama.cpp/deepseek-ai-DeepSeek-V4": "</think>",
    "llama.cpp/tencent-Hy3": "</think:opensource>",
    "llama.cpp/Cohere2MoE": "<|START_THINKING|><|END_THINKING|>",
    "llama.cpp/MiniMax-M3": "</mm:think>",
}


@pytest.mark.parametrize("name", OFF)
async def test_thoughts_are_switched_off_by_the_templates_own_variable(name: str):
    async with speaking("", template=published()[name]) as endpoint:
        for fields in SWITCHED:
            status, body = await endpoint.post(f"{CHAT}/render", {"messages": USER, **fields})
            assert status == 200, body
            assert body["prompt"].endswith(OFF[name]), (fields, body["prompt"][-80:])


# By template: accepted efforts, with a text of the prompt, and a refused effort.
EFFORTS = {
    "llama.cpp/openai-gpt-oss-120b": ({"low": "Reasoning: low", "high": "Reasoning: high"}, "none"),
    "llama.cpp/tencent-Hy3": ({"high": "<think:opensource>", "low": "<think:opensource>"}, "medium"),
    "llama.cpp/Kimi-K3": ({"low": "thinking_effort", "max": "thinking_effort"}, "medium"),
    "llama.cpp/meta-llama-Llama-3.1-8B-Instruct": ({}, "low"),
}


@pytest.mark.parametrize("name", EFFORTS)
async def test_an_effort_reaches_the_templates_own_variable_or_is_refused_by_name(name: str):
    accepted, refused = EFFORTS[name]
    async with speaking("", template=published()[name]) as endpoint:
        for effort, text in accepted.items():
            status, body = await endpoint.post(f"{CHAT}/render", {"messages": USER, "reasoning_effort": effort})
            assert status == 200, body
            assert text in body["prompt"]
        status, body = await endpoint.post(f"{CHAT}/render", {"messages": USER, "reasoning_effort": refused})
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "reasoning_effort", "unsupported")


async def test_a_refused_effort_is_answered_with_the_efforts_that_the_template_accepts():
    async with speaking("", template=published()["llama.cpp/Kimi-K3"]) as endpoint:
        _, body = await endpoint.post(CHAT, {"messages": USER, "reasoning_effort": "medium"})
        assert "accepts only low, high, max" in body["error"]["message"]


async def test_an_effort_that_anthropics_clients_send_to_every_model_is_never_refused():
    few = "{% if reasoning_effort is defined and reasoning_effort != 'low' %}{{ raise_exception('no') }}{% endif %}"
    async with speaking("", template=few + TEMPLATE) as endpoint:
        for thinking in ({}, {"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled"}}):
            counted = {"messages": USER, "output_config": {"effort": "max"}, **thinking}
            status, body = await endpoint.post("/v1/messages/count_tokens", counted)
            assert status == 200, body


async def test_a_budget_reaches_a_template_that_announces_it():
    async with speaking("", template=published()["llama.cpp/ByteDance-Seed-OSS"]) as endpoint:
        _, body = await endpoint.post(f"{CHAT}/render", {"messages": USER, "thinking_token_budget": 512})
    assert "512" in body["prompt"]


async def test_a_model_that_always_thinks_refuses_to_be_switched_off():
    async with speaking("", template=ALWAYS) as endpoint:
        for fields in SWITCHED[:6]:
            status, body = await endpoint.post(CHAT, {"messages": USER, **fields})
            assert (status, body["error"]["code"]) == (400, "unsupported"), fields
    async with speaking("Hello.", template=TEMPLATE.replace("enable_thinking", "other")) as endpoint:
        (choice,) = (await asked(endpoint, reasoning_effort="none"))["choices"]
    assert choice["message"]["content"] == "Hello."
