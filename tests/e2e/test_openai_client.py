"""The unmodified `openai` package works with infd."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, SchedulerConfig, ServerConfig
from infd.engine.lifecycle.state import State
from infd.http.auth import Keys
from tests.fakes import FakeExecutor, prompt_likelihoods
from tests.http.endpoint import Endpoint, serving
from tests.http.model import MODEL, chat_prompt, foretell, letters, tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.scheduler.plan import StepPlan

openai = pytest.importorskip("openai")

USER: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(endpoint: Endpoint, key: str = "secret") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(keys=Keys.of("secret")) as endpoint, client_of(endpoint) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(model=MODEL, messages=USER, seed=0, n=2, max_completion_tokens=12)

    expected = [foretell(chat_prompt("hi"), 12, seed=seed)[1] for seed in (0, 1)]
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_prompt("hi"))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == 24


async def test_chat_streamed(client: openai.AsyncOpenAI):
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, seed=0, n=2, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == [foretell(chat_prompt("hi"), 12, seed=seed)[1] for seed in (0, 1)]
    assert {choice.delta.role for choice in chunks[0].choices} == {"assistant"}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert not any(chunk.usage for chunk in chunks[:-1])


async def test_chat_with_logprobs(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model=MODEL, messages=USER, seed=0, max_tokens=3, logprobs=True, top_logprobs=2
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    ids, _ = foretell(chat_prompt("hi"), 3)
    assert [bytes(entry.bytes or []) for entry in logprobs.content] == [tokenizer().piece(token_id) for token_id in ids]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
    assert all(entry.logprob <= 0 for entry in logprobs.content)


async def test_the_stream_helper(client: openai.AsyncOpenAI):
    ids, _ = foretell(chat_prompt("hi"), 8)
    stop: Any = {"stop_token_ids": [ids[7]]}
    async with client.chat.completions.stream(model=MODEL, messages=USER, seed=0, extra_body=stop) as stream:
        final = await stream.get_final_completion()

    assert final.choices[0].message.content == tokenizer().decode(ids[: ids.index(ids[7])])


async def test_a_stop_string(client: openai.AsyncOpenAI):
    ids, text = foretell(chat_prompt("hi"), 40)
    stop = tokenizer().decode([ids[letters(ids)[3]]])

    answer = await client.chat.completions.create(model=MODEL, messages=USER, seed=0, max_tokens=40, stop=[stop])

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


async def test_completions(client: openai.AsyncOpenAI):
    prompts = [[5, 6, 7], [8, 9]]
    answer = await client.completions.create(model=MODEL, prompt=prompts, seed=0, max_tokens=10, logprobs=1)

    assert [choice.text for choice in answer.choices] == [foretell(prompt, 10)[1] for prompt in prompts]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 10


async def test_prompts_scored_as_evaluations_do_it(client: openai.AsyncOpenAI):
    prompts = [list(range(10, 30)), list(range(40, 130))]
    answer = await client.completions.create(model=MODEL, prompt=prompts, echo=True, logprobs=3, max_tokens=0)

    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text == tokenizer().decode(prompt)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, *(each.chosen for each in prompt_likelihoods(prompt))]


async def test_completions_streamed(client: openai.AsyncOpenAI):
    stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], seed=0, max_tokens=10, stream=True)

    assert "".join([chunk.choices[0].text async for chunk in stream]) == foretell([5, 6, 7], 10)[1]


async def test_models(client: openai.AsyncOpenAI):
    names = [model.id async for model in client.models.list()]

    assert names == [MODEL, "alias"]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_infds_own_fields_go_through_extra_body(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model="alias",
        messages=USER,
        seed=0,
        max_tokens=8,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True},
        extra_headers={"X-Request-Id": "mine"},
    )

    assert answer.model == "alias"
    assert answer._request_id == "mine"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": 5}, openai.BadRequestError, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
    ],
)
async def test_errors_that_a_client_can_fix(
    client: openai.AsyncOpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str
):
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**{"model": MODEL, "messages": USER, **fields})

    assert caught.value.param == param
    assert caught.value.request_id


async def test_a_wrong_key():
    async with serving(keys=Keys.of("secret")) as endpoint, client_of(endpoint, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_body_too_large():
    async with serving(Config(server=ServerConfig(max_body_bytes=1024))) as endpoint, client_of(endpoint) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=MODEL, prompt="x" * 2000)
    assert caught.value.status_code == 413


async def test_a_queue_that_is_full():
    config = Config(scheduler=SchedulerConfig(max_waiting=1))
    async with serving(config) as endpoint, client_of(endpoint) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model=MODEL, messages=USER, n=2)
    assert caught.value.code == "queue_full"


async def test_a_server_that_is_not_ready():
    async with serving() as endpoint, client_of(endpoint) as client:
        endpoint.engine.lifecycle.enter(State.PAUSED)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=USER)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"]


async def test_an_internal_error_before_and_within_a_stream():
    def fault(plan: StepPlan) -> None:
        if any(span.start > 8 for span in plan.spans):
            raise RuntimeError("broken")

    async with serving(executor=FakeExecutor(fault=fault)) as endpoint, client_of(endpoint) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model=MODEL, prompt=[5] * 12)
        assert caught.value.status_code == 500

        stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=20, stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            _ = [chunk async for chunk in stream]
