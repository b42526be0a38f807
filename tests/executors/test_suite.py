"""The contract of every executor, tested for each."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from infd.errors import CheckpointError, DeviceLost, Foreign, StepTooLarge
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.request import Adapter, SamplingParams
from infd.scheduler.plan import StepPlan
from tests.executors.faulty import BROKEN, FULL, LOST, UNSOUND, faulty, remote
from tests.runner.driving import config, generate, join, request, span
from tests.runner.fake_model import VOCAB, continuation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.engine.executor import Executor

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2], [7, 1, 8, 2, 8]]


@pytest.fixture(params=[faulty, remote], ids=["local", "remote"])
def make(request):
    return request.param


@asynccontextmanager
async def running(executor: Executor) -> AsyncIterator[Executor]:
    await executor.load()
    try:
        yield executor
    finally:
        await executor.close()


def start(row: int, tokens: list[int], page: int) -> StepPlan:
    """Return a plan that seats a sequence and samples its first token."""
    return StepPlan(0, [join(row, tokens, [[page]])], [], [span(row, 0, len(tokens))])


@pytest.mark.parametrize("depth", [1, 3])
async def test_any_number_of_steps_in_flight_gives_the_same_tokens(make, depth: int):
    executor = make(config(rows=3, depth=depth))
    capacity = await executor.load()
    assert executor.depth == depth
    requests = [
        request(prompt, SamplingParams(max_tokens=3 + i, temperature=0.0), name=str(i))
        for i, prompt in enumerate(PROMPTS)
    ]
    try:
        answers = await generate(executor, capacity, requests, depth=depth)
    finally:
        await executor.close()
    assert answers == [continuation(prompt, 3 + i) for i, prompt in enumerate(PROMPTS)]


async def test_a_step_samples_under_the_mask_that_it_is_given(make):
    async with running(make(config())) as executor:
        mask = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
        mask[0, 1] = 1 << 5

        assert (await executor.forward(start(0, [3, 4], 1)).sample(mask)).tokens == [37]


async def test_a_failed_step_fails_steps_in_flight_and_none_issued_later(make):
    async with running(make(config())) as executor:
        bad = executor.forward(start(0, [UNSOUND], 1)).sample()
        behind = executor.forward(start(1, [4], 2)).sample()
        with pytest.raises((KeyError, Foreign), match="the kernel said no"):
            await bad
        with pytest.raises((KeyError, Foreign), match="the kernel said no"):
            await behind

        assert (await executor.forward(start(1, [4], 2)).sample()).tokens == continuation([4], 1)


async def test_a_step_too_large_for_memory_fails_with_its_own_error(make):
    async with running(make(config())) as executor:
        with pytest.raises(StepTooLarge, match="no room"):
            await executor.forward(start(0, [FULL], 1)).sample()


async def test_a_lost_device_fails_with_its_own_error(make):
    async with running(make(config())) as executor:
        with pytest.raises(DeviceLost, match="an uncorrectable error"):
            await executor.forward(start(0, [LOST], 1)).sample()


async def test_a_model_that_cannot_be_loaded_fails_with_the_reason(make):
    settings = config()
    executor = make(msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, path=BROKEN)))
    with pytest.raises(CheckpointError, match="/broken: no model") as error:
        await executor.load()
    await executor.close()
    assert error.value.exit_code == os.EX_CONFIG


async def test_released_memory_is_restored_and_no_step_runs_without_it(make):
    async with running(make(config())) as executor:
        assert executor.sleep_refusal == ""
        assert executor.released_by(1) == {MemoryPart.CACHE}
        assert executor.released_by(2) == ALL
        assert await executor.sleep(1) >= 0
        assert executor.memory == Memory(cache=Residency.RELEASED)
        with pytest.raises((RuntimeError, Foreign), match="while memory is released"):
            await executor.forward(start(0, [3], 1)).sample()
        await executor.wake(ALL)

        assert executor.memory == Memory()
        assert (await executor.forward(start(0, [3], 1)).sample()).tokens == continuation([3], 1)


async def test_failed_calls_raise_the_reason(make):
    async with running(make(config())) as executor:
        with pytest.raises(CheckpointError, match="/nowhere"):
            await executor.load_weights("/nowhere")
        with pytest.raises(CheckpointError, match="adapter"):
            await executor.read_adapter(Adapter("a", 1, "/nowhere"), None, 2**20)
        executor.forget_adapter(Adapter("a", 1, "/nowhere"), None)

        assert executor.memory == Memory()


async def test_its_facts_are_plain_and_its_pulse_moves(make):
    async with running(make(config())) as executor:
        before = executor.pulse()
        await executor.forward(start(0, [3], 1)).sample()
        while executor.pulse() == before:
            await asyncio.sleep(0.01)

        assert executor.describe()["device"] == "cpu"
        assert msgspec.json.encode(executor.describe())


async def test_a_step_after_close_fails_and_closing_again_does_nothing(make):
    executor = make(config())
    await executor.load()
    await executor.close()
    await executor.close()

    with pytest.raises(DeviceLost):
        await executor.forward(start(0, [3], 1)).sample()


async def test_an_executor_that_was_never_loaded_can_be_closed(make):
    await make(config()).close()


async def test_progress_is_reported(make):
    told: list[tuple[int, int]] = []
    async with running(make(config(), lambda done, total: told.append((done, total)))):
        assert told == [(3, 4)]


async def test_the_answer_to_a_load_that_was_cancelled_is_dropped():
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    executor = remote(config())
    loading = asyncio.ensure_future(executor.load())
    while not executor._calls:
        await asyncio.sleep(0)
    loading.cancel()
    while executor._calls:  # until it has arrived
        await asyncio.sleep(0.01)
    await executor.close()

    assert not told
