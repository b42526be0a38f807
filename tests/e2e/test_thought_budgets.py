"""Budgets of thoughts through sockets: on the embedded model, and on a random one whose marks are spelled by bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import Daemon
from tests.e2e.random_models import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

openai = pytest.importorskip("openai")
streaming = pytest.importorskip("openai.lib.streaming.chat")

USER: Any = [{"role": "user", "content": "What's the weather in Lisbon?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Lisbon", "Porto"]}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
OPTIONS = ("--device", "cpu", "--dtype", "float32", "--set", "device.threads=1")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    daemons: list[Daemon] = []
    clients: list[Any] = []

    def started(*options: str) -> Any:
        daemons.append(Daemon(tmp_path_factory.mktemp("daemon"), [*OPTIONS, *options], {}))
        host, port = daemons[-1].ready().address
        clients.append(openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0))
        return clients[-1]

    yield started
    for client in clients:
        client.close()
    for daemon in daemons:
        daemon.close()


@pytest.fixture(scope="module")
def client(start: Callable[..., Any]) -> Any:
    return start()


def ask(client: Any, *, stream: bool = False, budget: int | None = None, **fields: Any) -> Any:
    extra = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}
    said = {"model": "", "messages": USER, "max_tokens": 150, "seed": 1, "extra_body": extra} | fields
    if not stream:
        return client.chat.completions.create(**said)
    state: Any = streaming.ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**said, stream=True, stream_options={"include_usage": True}):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def thought(choice: Any) -> str:
    return getattr(choice.message, "reasoning", None) or ""


def shown(answer: Any) -> list[Any]:
    return [
        (
            thought(choice),
            choice.message.content,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_the_embedded_model_answers_after_a_thought_cut_by_its_budget(client: Any, stream: bool):
    (free,) = ask(client, temperature=0).choices
    for budget in (0, 1, 4):
        answer = ask(client, budget=budget, temperature=0, stream=stream)
        (choice,) = answer.choices
        assert answer.usage.completion_tokens_details.reasoning_tokens <= budget + 2  # the marks are tokens
        assert thought(free).startswith(thought(choice))
        assert len(thought(choice)) < len(thought(free))
        assert choice.message.content
        assert "think>" not in choice.message.content
    assert shown(ask(client, budget=100, temperature=0, stream=stream)) == shown(ask(client, temperature=0))


def test_choices_streamed_or_not_keep_the_budget_beside_forced_calls(client: Any):
    fields = {"tools": TOOLS, "tool_choice": "required", "n": 6, "temperature": 1.3, "budget": 3}
    whole = ask(client, **fields)
    assert whole.usage.completion_tokens_details.reasoning_tokens <= 6 * (3 + 2)
    assert any(thought(choice) for choice in whole.choices)
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            assert json.loads(call.function.arguments)["city"] in {"Lisbon", "Porto"}
    assert shown(ask(client, **fields, stream=True)) == shown(whole)


def test_log_probabilities_of_a_forced_mark_are_those_before_the_mask(client: Any):
    fields: Any = {"temperature": 0, "logprobs": True, "top_logprobs": 3}
    free, cut = (ask(client, budget=budget, **fields).choices[0].logprobs.content for budget in (None, 2))
    at = next(i for i, (a, b) in enumerate(zip(free, cut, strict=False)) if a.token != b.token)
    assert [each.logprob for each in cut[at].top_logprobs] == [each.logprob for each in free[at].top_logprobs]
    assert cut[at].token == "</think>"
    assert cut[at].logprob < min(each.logprob for each in cut[at].top_logprobs)


def test_a_random_model_closes_a_thought_that_the_prompt_has_opened(start: Callable[..., Any], tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n{# the model writes </think> #}"
    )
    client = start("--model", str(checkpoint("byte_level", tmp_path / "model")), "--chat-template", str(template))
    fields = {"n": 4, "temperature": 1.5, "max_tokens": 60}
    unlimited = ask(client, **fields)
    assert all(choice.message.content is None for choice in unlimited.choices)
    for budget in (0, 5, 17):
        answer = ask(client, budget=budget, **fields)
        assert answer.usage.completion_tokens_details.reasoning_tokens <= 4 * (budget + len("</think>"))
        for mine, free in zip(answer.choices, unlimited.choices, strict=True):
            assert mine.message.content
            assert thought(free).startswith(thought(mine).rstrip("\ufffd"))
    constrained = ask(
        client,
        budget=5,
        **fields,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", 7]}}},
    )
    assert {json.loads(choice.message.content) for choice in constrained.choices} <= {"yes", 7}
