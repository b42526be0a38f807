"""POST /v1/embeddings: kinds of input, forms of the answer, dimensions."""

from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING

import pytest

from infd.config import Config, LimitsConfig, SchedulerConfig
from infd.scheduler.layout import CacheLayout
from tests.fakes import FULL, FakeExecutor, capacity
from tests.http.endpoint import serving
from tests.http.model import chat_prompt, template, tokenizer
from tests.http.pooling.asking import USER, embed, ids, refused, settings, state
from tests.http.test_connections import connect, said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.endpoint import Endpoint


async def test_every_kind_of_input_is_embedded(endpoint: Endpoint):
    rendered = template().render([USER], add_generation_prompt=False)
    conversation = tokenizer().encode(rendered, add_special_tokens=False)

    assert await embed(endpoint, "a text") == [state("a text")]
    assert await embed(endpoint, ["one", "two"]) == [state("one"), state("two")]
    assert await embed(endpoint, [5, 6, 7]) == [state([5, 6, 7])]
    assert await embed(endpoint, [[5, 6], [7]]) == [state([5, 6]), state([7])]
    for given in ({"messages": [USER]}, {"messages": [[USER]]}):
        assert await embed(endpoint, None, **given) == [state(conversation)]
    assert await embed(endpoint, [USER]) == [state(conversation)]
    assert await embed(endpoint, [[USER], [USER, USER]]) == [
        state(conversation),
        state(tokenizer().encode(rendered * 2, add_special_tokens=False)),
    ]
    assert await embed(endpoint, None, messages=[USER], add_generation_prompt=True) == [state(chat_prompt("hi"))]


@pytest.mark.parametrize("divisible", [True, False])
async def test_inputs_that_finish_before_earlier_ones_keep_their_places(divisible: bool):
    layout = FULL if divisible else CacheLayout((), divisible=False)
    limits = capacity(layout, pages=512 if divisible else 0, rows=16, step_tokens=256, max_model_len=256)
    inputs = [[5 + number] * (200 - number if number % 2 == 0 else 2) for number in range(8)]
    async with serving(executor=FakeExecutor(limits)) as endpoint:
        found = await embed(endpoint, inputs)
        ends = [span.start + span.count for step in endpoint.executor.issued for span in step.plan.spans]
        _, tokens = await endpoint.post("/pooling", {"input": inputs, "task": "token_embed"})

    assert ends.index(2) < ends.index(200), "a short input finishes before the first long one"
    assert ends[-1] == len(inputs[6]), "the last to finish is not the last input"
    assert found == [state(each) for each in inputs]
    assert [[number for row in each["data"] for number in row] for each in tokens["data"]] == [
        state(each, "token_embed") for each in inputs
    ]


async def test_the_answer_has_openais_form(endpoint: Endpoint):
    status, body = await endpoint.post("/v1/embeddings", {"input": ["one", "two three"], "model": "alias", "user": "u"})

    tokens = len(ids("one")) + len(ids("two three"))
    assert status == 200
    assert body.pop("id").startswith("embd-")
    assert body.pop("created") > 0
    assert body == {
        "object": "list",
        "model": "alias",
        "data": [
            {"object": "embedding", "index": 0, "embedding": state("one")},
            {"object": "embedding", "index": 1, "embedding": state("two three")},
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


async def test_base64_has_the_bytes_of_the_numbers(endpoint: Endpoint):
    for fields, form in (
        ({}, "<f"),
        ({"endianness": "big"}, ">f"),
        ({"endianness": "native"}, "=f"),
        ({"embed_dtype": "float16"}, "<e"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">e"),
    ):
        (found,) = await embed(endpoint, "a", encoding_format="base64", **fields)
        assert list(struct.unpack(form, base64.b64decode(found))) == state("a"), fields


async def test_dimensions_are_those_for_which_the_model_was_trained(endpoint: Endpoint):
    settings(endpoint, dimensions=8, matryoshka=(2, 4))
    for wanted in (2, 4, 8):
        await embed(endpoint, "a", dimensions=wanted)
    error = await refused(endpoint, "/v1/embeddings", {"input": "a", "dimensions": 3})
    assert "one of 2, 4" in error["message"]


@pytest.fixture
async def small() -> AsyncIterator[Endpoint]:
    config = Config(limits=LimitsConfig(pooled_bytes=40), scheduler=SchedulerConfig(max_waiting=100))
    async with serving(config) as endpoint:
        yield endpoint


async def test_an_answer_larger_than_the_limit_is_refused(small: Endpoint):
    assert len(await embed(small, ["a"] * 10)) == 10
    error = await refused(small, "/v1/embeddings", {"input": ["a"] * 11})
    assert "limits.pooled_bytes" in error["message"]
    assert error["param"] == "input"
    error = await refused(small, "/pooling", {"input": [5] * 11, "task": "token_embed"})
    assert "limits.pooled_bytes" in error["message"]
    error = await refused(small, "/v1/embeddings", {"input": ["a"] * 101})
    assert "scheduler.max_waiting" in error["message"]


async def test_a_large_answer_is_encoded_while_it_is_sent(endpoint: Endpoint):
    given = [[5 + number % 200, 6] for number in range(900)]

    async with endpoint.session.post("/v1/embeddings", json={"input": given}) as response:
        assert "Content-Length" not in response.headers
        body = await response.json()

    assert [each["embedding"] for each in body["data"]] == [state(prompt) for prompt in given]


async def test_a_large_answer_for_an_older_client_ends_with_its_connection(endpoint: Endpoint):
    given = [[5 + number % 200, 6] for number in range(900)]
    body = json.dumps({"input": given}).encode()
    sent = f"POST /v1/embeddings HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    head, _, answer = (await said(await connect(endpoint, sent.encode() + body))).partition(b"\r\n\r\n")

    assert b"chunked" not in head
    assert len(json.loads(answer)["data"]) == len(given)
