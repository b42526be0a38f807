"""The numbers of large answers are bounded together, from before they are computed until they are sent."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, SchedulerConfig
from infd.http.apis.embeddings import POOLING
from infd.http.exchange import Exchange
from infd.http.pooling.held import SMALL_BYTES
from infd.http.pooling.pool import pool
from infd.http.schema.pooling import PoolingRequest
from tests.fakes import FakeExecutor
from tests.http.endpoint import serving
from tests.http.test_streaming import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.http.endpoint import Endpoint

TOKENS = 200


def large(answers: int = 1) -> dict[str, Any]:
    """Return a request whose answer has `answers` times 80,000 bytes of numbers."""
    return {"input": [[5] * TOKENS] * (100 * answers), "task": "token_embed"}


SIZE = 100 * TOKENS * 4


@pytest.fixture
async def narrow() -> AsyncIterator[Endpoint]:
    """Return an endpoint that holds one large answer beside no other, and whose model computes nothing yet."""
    executor = FakeExecutor()
    executor.gate.clear()
    async with serving(Config(scheduler=SchedulerConfig(max_pooled_bytes=SIZE)), executor=executor) as endpoint:
        yield endpoint


async def test_large_answers_are_bounded_together_and_small_ones_are_not(narrow: Endpoint):
    held = narrow.server.service.held_numbers
    first = asyncio.create_task(narrow.post("/pooling", large()))
    await until(lambda: held.size == SIZE > SMALL_BYTES)

    status, answer = await narrow.post("/pooling", large())
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert "scheduler.max_pooled_bytes" in answer["error"]["message"]
    small = asyncio.create_task(narrow.post("/pooling", {"input": [[5] * TOKENS] * 2, "task": "token_embed"}))
    narrow.executor.gate.set()

    assert (await first)[0] == (await small)[0] == 200
    assert (await narrow.post("/pooling", large(2)))[0] == 200, "alone, an answer is never too large"
    await until(lambda: held.size == 0)


async def test_a_request_that_ends_without_an_answer_holds_no_numbers(narrow: Endpoint):
    held = narrow.server.service.held_numbers
    leaving = asyncio.create_task(narrow.post("/pooling", large()))
    await until(lambda: held.size == SIZE)
    leaving.cancel()
    await until(lambda: held.size == 0)


@pytest.mark.parametrize("sent", [False, True])
async def test_numbers_are_held_until_the_answer_is_sent_or_dropped(endpoint: Endpoint, sent: bool):
    service, request = endpoint.server.service, PoolingRequest(**large())
    asked = POOLING.pooling(request, 1000, service.model(), service.config)
    pieces: Iterator[bytes] = iter(await pool(asked, partial(POOLING.body, request), Exchange(), service))
    next(pieces)
    assert service.held_numbers.size == SIZE

    if sent:
        list(pieces)
    else:
        del pieces
    assert service.held_numbers.size == 0
