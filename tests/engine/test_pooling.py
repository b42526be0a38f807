"""A request that pools gets one delta with its numbers, through the queue, the steps and the recoveries of others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from infd.errors import InvalidRequest, PromptTooLong, Unsupported
from infd.request import FinishReason, Pool, Request, Score
from infd.scheduler.layout import CacheLayout
from tests.engine.driving import ask, request, serving
from tests.fakes import FakeExecutor, Seated, capacity, continuation, pooled

if TYPE_CHECKING:
    from infd.engine.engine import Engine
    from infd.engine.streams.stream import Delta
    from infd.scheduler.plan import StepPlan

EMBED = Pool("embed")
POISON = 499


def pooling(prompt: list[int], pool: Pool = EMBED) -> Request:
    return Request(id="r", prompt=tuple(prompt), wants=(pool,))


async def reduce(engine: Engine, *requests: Request) -> list[Delta]:
    async with engine.admit(len(requests), 0) as ticket:
        deltas = [each async for each in await ticket.submit(*requests)]
    assert sorted(index for index, _ in deltas) == list(range(len(requests))), "not one delta for each prompt"
    return [delta for _, delta in sorted(deltas, key=lambda each: each[0])]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("divisible", [True, False])
async def test_each_pooled_prompt_of_a_request_gets_its_numbers_beside_generating_sequences(
    depth: int, divisible: bool
):
    limits = capacity() if divisible else capacity(CacheLayout((), divisible=False), pages=0, step_tokens=64)
    requests = [
        pooling([n, *range(n)], pool) for n in range(1, 40) for pool in (EMBED, Pool("token_embed", skip=n // 2))
    ]
    async with serving(FakeExecutor(limits, depth=depth)) as engine:
        deltas, answer = await asyncio.gather(reduce(engine, *requests), ask(engine, request([7, 8], 1)))
        status = engine.status()

    assert [(delta.pooled, delta.token_ids, delta.finish) for delta in deltas] == [
        (pooled(each.wants[0], list(each.prompt), limits), [], FinishReason.STOP)  # type: ignore[arg-type]
        for each in requests
    ]
    assert answer == {0: (continuation([7, 8], 1, layout=limits.layout), FinishReason.LENGTH)}
    assert status.terminal["stop"] == len(requests)


async def test_a_prompt_that_makes_steps_fail_is_found_and_fails_alone():
    seated = Seated()

    def fault(plan: StepPlan) -> None:
        if any(POISON in tokens for tokens in seated.of(plan)):
            raise RuntimeError("the kernel said no")

    async with serving(FakeExecutor(fault=fault)) as engine:
        deltas = await reduce(engine, *(pooling([n, POISON if n == 3 else n]) for n in range(6)))

    assert [delta.finish for delta in deltas] == [FinishReason.ERROR if n == 3 else FinishReason.STOP for n in range(6)]


async def test_unread_numbers_count_as_bytes_of_the_readers_buffer():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        choices = await ticket.submit(pooling([5] * 9, Pool("token_embed")))
        while not choices.ready:
            await asyncio.sleep(0)
        assert choices.streams[0].inbox.pending_bytes == 9 * 4
        choices.take()
        assert choices.streams[0].inbox.pending_bytes == 0


async def test_the_metrics_count_the_prompt_and_no_token():
    async with serving() as engine:
        await reduce(engine, pooling([5] * 9), pooling([6] * 3))
        metrics = engine.metrics

    assert (metrics.prompt_tokens, metrics.generation_tokens) == (12, 0)
    assert sum(metrics.e2e.counts) == sum(metrics.ttft.counts) == sum(metrics.prefill.counts) == 2
    for histogram in (metrics.inter_token, metrics.per_token, metrics.decode, metrics.request_generation_tokens):
        assert not any(histogram.counts)


async def test_what_the_model_cannot_do_is_refused_by_name():
    limits = capacity(max_model_len=8)
    async with serving(FakeExecutor(limits)) as engine:
        await reduce(engine, pooling([1] * 8))
        with pytest.raises(PromptTooLong, match=r"is 9 tokens; this model's maximum context length is 8 tokens$"):
            await reduce(engine, pooling([1] * 9))
        with pytest.raises(InvalidRequest, match="skips 3 of 3 tokens"):
            await reduce(engine, pooling([1] * 3, Pool("embed", skip=3)))

    async with serving(FakeExecutor(replace(limits, generates=False, pools=("embed",)))) as engine:
        with pytest.raises(Unsupported, match="generation by this model"):
            await ask(engine, request([1, 2]))
        with pytest.raises(Unsupported, match="generation by this model"):
            await reduce(engine, Request(id="r", prompt=(1, 2), wants=(Score(),)))
        with pytest.raises(Unsupported, match="the task classify"):
            await reduce(engine, pooling([1, 2], Pool("classify")))
