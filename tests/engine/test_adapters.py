"""Adapters are loaded and unloaded while requests run: each request keeps its generation, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infd.config import Config, LiveConfig, LoraConfig, SchedulerConfig
from infd.engine.engine import Engine
from infd.errors import AdapterExists, AdapterTooLarge, AdapterUnavailable, CheckpointError, ModelNotFound
from infd.request import Adapter, FinishReason, Generate, Request, SamplingParams
from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Metrics
from tests.engine.driving import ask, collect, nothing_is_left, running, until_steps
from tests.fakes import FakeExecutor, capacity, continuation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SOAK = bool(os.environ.get("INFD_SOAK"))
MIB = 2**20


def request(prompt: list[int], adapter: str | None, count: int = 5) -> Request:
    return Request(id="r", prompt=tuple(prompt), wants=(Generate(SamplingParams(max_tokens=count)),), adapter=adapter)


@asynccontextmanager
async def serving(
    executor: FakeExecutor | None = None, *, slots: int = 4, per_step: int = 4, host_bytes: int = 100 * MIB
) -> AsyncIterator[Engine]:
    executor = executor or FakeExecutor(depth=2)
    executor.files.update(dict.fromkeys("abcdefgh", (10 * MIB, 1)))
    lora = LoraConfig(max_adapters=slots, max_adapters_per_step=per_step, host_bytes=host_bytes)
    config = Config(lora=lora, scheduler=SchedulerConfig(max_waiting=4096))
    engine = Engine(LiveConfig(config), executor, Metrics("base"), names=("base",))
    async with running(engine):
        yield engine
        await idle(engine)
        no_adapter_is_left(engine)


async def idle(engine: Engine) -> None:
    while engine.status().tickets or engine.core.loop.in_flight:
        await asyncio.sleep(0)


def no_adapter_is_left(engine: Engine) -> None:
    nothing_is_left(engine)
    assert not engine.core.scheduler.adapters.running
    assert all(row.requests == 0 and row.state != "leaving" for row in engine.adapters.rows())
    assert engine.adapters.bytes == sum(row.bytes for row in engine.adapters.rows())


def answer(prompt: list[int], generation: int | None, count: int = 5) -> dict[int, tuple[list[int], FinishReason]]:
    adapter = None if generation is None else Adapter("any", generation)
    return {0: (continuation(prompt, count, adapter=adapter), FinishReason.LENGTH)}


async def test_requests_choose_their_adapter_by_name():
    async with serving() as engine:
        for name in "ab":
            assert await engine.adapters.load(name, name)
        asked = [(None, None), ("a", 1), ("b", 2), ("a", 1), (None, None)]
        answers = await asyncio.gather(*(ask(engine, request([7] * 9, name)) for name, _ in asked))

        assert answers == [answer([7] * 9, generation) for _, generation in asked]
        assert "infd_adapter_requests_total" in expose(engine.metrics.snapshot()).decode()


async def test_a_name_that_was_never_loaded_is_not_found():
    async with serving() as engine:
        await engine.adapters.load("a", "a")
        with pytest.raises(ModelNotFound, match="served: base, a"):
            await ask(engine, request([1], "b"))
        assert engine.adapters.rows()[0].requests == 0


async def test_a_cached_prefix_is_never_shared_across_adapters_or_generations():
    async with serving() as engine:
        await engine.adapters.load("a", "a")
        for generation in (1, 2):
            for name, expected in ((None, None), ("a", generation), (None, None), ("a", generation)):
                assert await ask(engine, request([3] * 20, name)) == answer([3] * 20, expected)
            await engine.adapters.load("a", "a", in_place=True)
        engine.adapters.unload("a")
        await engine.adapters.load("a", "a")
        assert await ask(engine, request([3] * 20, "a")) == answer([3] * 20, 4)


async def test_running_requests_keep_their_generation_of_a_replaced_adapter():
    executor = FakeExecutor(depth=2)
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        old = asyncio.create_task(ask(engine, request([1] * 9, "a", 60)))
        await until_steps(engine, 5)
        assert await engine.adapters.load("a", "b", in_place=True)
        assert [(row.state, row.requests) for row in engine.adapters.rows()] == [("ready", 0), ("leaving", 1)]
        new = asyncio.create_task(ask(engine, request([1] * 9, "a", 60)))

        assert (await old, await new) == (answer([1] * 9, 1, 60), answer([1] * 9, 2, 60))
        await engine.adapters.wait_until_unused("a")
        assert [row.generation for row in engine.adapters.rows()] == [2]


async def test_unloading_refuses_new_requests_lets_running_ones_finish_and_then_frees():
    executor = FakeExecutor(depth=2)
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        running = asyncio.create_task(ask(engine, request([1] * 9, "a", 60)))
        await until_steps(engine, 5)
        row = engine.adapters.unload("a")
        assert row is not None
        assert (row.state, row.requests) == ("leaving", 1)
        with pytest.raises(ModelNotFound):
            await ask(engine, request([1], "a"))
        leaving = asyncio.create_task(engine.adapters.wait_until_unused("a"))
        await asyncio.sleep(0)
        assert not leaving.done()
        assert executor.device.adapters

        assert await running == answer([1] * 9, 1, 60)
        await leaving
        await idle(engine)
        assert engine.adapters.bytes == 0
        while executor.device.slots:  # the device unloads it after its steps
            await asyncio.sleep(0)
        assert not executor.device.adapters, "unloaded, and still in memory"
        assert engine.adapters.unload("a") is None


async def test_loading_a_loaded_adapter_changes_nothing_and_another_path_is_refused():
    async with serving() as engine:
        assert await engine.adapters.load("a", "a")
        assert not await engine.adapters.load("a", "a")
        with pytest.raises(AdapterExists, match="--in-place"):
            await engine.adapters.load("a", "b")
        with pytest.raises(AdapterExists, match="the model's own name"):
            await engine.adapters.load("base", "b")
        assert [row.generation for row in engine.adapters.rows()] == [1]


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "/a", "a/", "a//b", "é", "a\n", "-a", "x" * 129, "../a", "a/..", "a/./b", "a/../b"]
)
async def test_a_name_must_be_fit_to_be_shown(name: str):
    async with serving() as engine:
        with pytest.raises(CheckpointError, match="cannot be a name"):
            await engine.adapters.load(name, "a")
        assert await engine.adapters.load("org/a-1.5_b:c", "a")
        assert await engine.adapters.load("a../..b/...", "a")


async def test_a_failed_load_keeps_the_previous_adapter():
    async with serving() as engine:
        await engine.adapters.load("a", "a")
        for name, in_place in (("a", True), ("new", False)):
            with pytest.raises(CheckpointError):
                await engine.adapters.load(name, "absent", in_place=in_place)
        assert list(engine.adapters) == ["a"]
        assert await ask(engine, request([2], "a")) == answer([2], 1)


async def test_unused_adapters_are_evicted_and_read_again():
    executor = FakeExecutor()
    async with serving(executor, host_bytes=25 * MIB) as engine:
        for name in "abc":
            await engine.adapters.load(name, name)
        assert [row.state for row in engine.adapters.rows()] == ["stored", "ready", "ready"]
        assert engine.adapters.bytes == 20 * MIB
        for name, generation in (("a", 1), ("b", 2), ("c", 3), ("a", 1)):
            assert await ask(engine, request([5] * 9, name)) == answer([5] * 9, generation)
            assert engine.adapters.bytes <= 25 * MIB
        assert len({name for name in "abc" if engine.adapters.row(name).state == "ready"}) == 2


async def test_an_adapter_is_followed_from_load_to_its_last_byte():
    async with serving(host_bytes=15 * MIB) as engine:
        for name in "ab":
            await engine.adapters.load(name, name)
        await ask(engine, request([5], "a"))
        await engine.adapters.load("a", "c", in_place=True)
        for name in "ab":
            engine.adapters.unload(name)
        events = [event async for event, _ in engine.events.read() if event.kind == "adapter"]
    assert [f"{event.facts['name']} {event.message}" for event in events] == [
        "a loaded",
        "a stored",
        "b loaded",
        "b stored",
        "a read again",
        "a stored",
        "a replaced",
        "a unloaded",
        "a freed",
        "b unloaded",
    ]
    assert [event.facts["generation"] for event in events if event.facts["name"] == "a"] == [1, 1, 1, 1, 3, 3, 3]


def adapters_counted(engine: Engine) -> dict[str, float]:
    """Return the number of ended sequences of each adapter, from the metrics."""
    scraped = text_string_to_metric_families(expose(engine.metrics.snapshot()).decode())
    rows = next(family for family in scraped if family.name == "infd_adapter_requests").samples
    return {row.labels["adapter"]: row.value for row in rows}


async def test_metrics_count_an_adapter_while_it_is_loaded_or_in_use():
    async with serving(host_bytes=25 * MIB) as engine:
        for name in "abc":  # the first leaves memory
            await engine.adapters.load(name, name)
        for name in "abcc":
            await ask(engine, request([5], name))
        assert adapters_counted(engine) == {"a": 1, "b": 1, "c": 2}
        running = asyncio.create_task(ask(engine, request([1] * 9, "c", 60)))
        while not engine.status().running:
            await asyncio.sleep(0)
        for name in "abc":
            engine.adapters.unload(name)
        assert adapters_counted(engine) == {"c": 2}
        await running
        assert adapters_counted(engine) == {}
        await engine.adapters.load("c", "c")
        await ask(engine, request([5], "c"))
        await engine.adapters.load("c", "b", in_place=True)
        assert adapters_counted(engine) == {"c": 1}


async def test_an_adapter_whose_files_changed_is_not_served_as_the_old_one():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        engine.adapters.store()
        executor.files["a"] = (10 * MIB, 2)
        with pytest.raises(AdapterUnavailable, match="--in-place"):
            await ask(engine, request([5], "a"))
        del executor.files["a"]
        with pytest.raises(AdapterUnavailable, match="No such file"):
            await ask(engine, request([5], "a"))
        executor.files["a"] = (10 * MIB, 2)
        await engine.adapters.load("a", "a", in_place=True)
        assert await ask(engine, request([5], "a")) == answer([5], 2)


async def test_adapters_in_use_are_never_put_out_of_memory():
    executor = FakeExecutor()
    async with serving(executor, host_bytes=15 * MIB) as engine:
        await engine.adapters.load("a", "a")
        executor.gate.clear()
        running = asyncio.create_task(ask(engine, request([1] * 9, "a")))
        while not engine.status().running:
            await asyncio.sleep(0)
        with pytest.raises(AdapterTooLarge, match="unload others"):
            await engine.adapters.load("b", "b")
        engine.adapters.store()
        assert engine.adapters.row("a").state == "ready"
        executor.gate.set()
        assert await running == answer([1] * 9, 1)
        assert await engine.adapters.load("b", "b")
        assert engine.adapters.row("a").state == "stored"


async def test_an_adapter_is_read_once_for_all_requests_that_wait_for_it():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        engine.adapters.store()
        executor.reading.clear()
        reads = executor.reads
        asking = [asyncio.create_task(ask(engine, request([i], "a"))) for i in range(5)]
        for _ in range(5):
            await asyncio.sleep(0)
        asking.pop().cancel()
        executor.reading.set()
        assert await asyncio.gather(*asking) == [answer([i], 1) for i in range(4)]
        assert executor.reads == reads + 1


async def test_a_request_aborted_while_its_adapter_is_read_is_not_queued():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        engine.adapters.store()
        executor.reading.clear()
        asking = asyncio.create_task(ask(engine, request([1], "a")))
        for _ in range(5):
            await asyncio.sleep(0)
        (row,) = engine.requests()
        assert (row.state, row.adapter) == ("admitted", "a")
        assert engine.abort(row.id)
        executor.reading.set()
        with pytest.raises(Exception, match="aborted"):
            await asking


async def test_an_unload_during_a_read_wins():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        engine.adapters.store()
        executor.reading.clear()
        asking = asyncio.create_task(ask(engine, request([1], "a")))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.adapters.unload("a")
        executor.reading.set()
        with pytest.raises(ModelNotFound):
            await asking
        assert engine.adapters.bytes == 0


async def test_more_adapters_than_slots_take_turns():
    async with serving(slots=2, per_step=2) as engine:
        for name in "abcdef":
            await engine.adapters.load(name, name)
        asked = [(name, generation, seed) for seed in range(4) for generation, name in enumerate("abcdef", 1)]
        answers = await asyncio.gather(*(ask(engine, request([seed] * 9, name, 12)) for name, _, seed in asked))

        assert answers == [answer([seed] * 9, generation, 12) for _, generation, seed in asked]


async def test_a_failed_step_loads_its_adapters_again():
    plans = 0

    def fault(plan):
        nonlocal plans
        plans += 1
        if plan.loads and plans < 6:
            raise RuntimeError("the copy failed")

    executor = FakeExecutor(depth=2, fault=fault)
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        answers = await asyncio.gather(
            *(ask(engine, request([i] * 9, "a" if i % 2 else None, 12)) for i in range(6)), return_exceptions=True
        )
        whole = [each for i, each in enumerate(answers) if each == answer([i] * 9, 1 if i % 2 else None, 12)]
        assert len(whole) >= 4, answers
        assert await ask(engine, request([9] * 9, "a")) == answer([9] * 9, 1)


async def test_loads_unloads_and_reloads_race_requests():
    """SAFETY: nothing lost, hung or crashed; no page, row, slot, task or pin left; each answer is of one generation."""
    rounds = 10_000 if SOAK else 100
    executor = FakeExecutor(capacity(pages=256, rows=16, step_tokens=64, max_model_len=256), depth=2)
    rng = random.Random(5)
    tasks_before = len(asyncio.all_tasks())
    outcomes = {"answered": 0, "gone": 0, "left": 0}

    async with serving(executor, slots=3, per_step=2, host_bytes=45 * MIB) as engine:
        adapters = engine.adapters

        async def client(seed: int) -> None:
            name = rng.choice([None, *"abcd"])
            prompt = [seed % 7] * rng.randrange(1, 30)
            count = rng.randrange(1, 20)
            try:
                async with engine.admit(1, 0) as ticket:
                    choices = await ticket.submit(request(prompt, name, count))
                    adapter = ticket.choices[0].seq.adapter
                    if rng.random() < 0.2:  # its reader leaves
                        await asyncio.sleep(0)
                        outcomes["left"] += 1
                        return
                    tokens, finish = (await collect(choices))[0]
            except ModelNotFound:
                outcomes["gone"] += 1
                return
            assert finish is FinishReason.LENGTH
            assert tokens == continuation(prompt, count, adapter=adapter)
            assert (adapter is None) == (name is None)
            outcomes["answered"] += 1

        async def operator() -> None:
            for _ in range(rounds):
                name, path = rng.choice("abcd"), rng.choice("abcd")
                try:
                    match rng.randrange(4):
                        case 0 | 1:
                            await adapters.load(name, path, in_place=rng.random() < 0.7)
                        case 2:
                            adapters.unload(name)
                        case 3:
                            adapters.store()
                except (AdapterExists, AdapterTooLarge):
                    pass
                assert adapters.bytes <= 45 * MIB
                engine.core.scheduler.verify()
                await asyncio.sleep(0)

        async def crowd() -> None:
            for first in range(0, rounds, 10):
                await asyncio.gather(*(client(first + i) for i in range(10)))

        await asyncio.gather(operator(), crowd(), crowd())
        await idle(engine)
        nothing_is_left(engine)
        for name in list(adapters):
            adapters.unload(name)
        assert adapters.bytes == 0
        assert not adapters._by_adapter
        while executor.device.slots:
            await asyncio.sleep(0)
        assert engine.core.scheduler.adapters._slots == {}
    assert outcomes["answered"] > rounds // 2
    assert outcomes["gone"]
    assert len(asyncio.all_tasks()) <= tasks_before + 1  # the fake's own worker


async def test_a_deep_sleep_evicts_adapters_and_the_next_request_reads_them_again():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        assert await ask(engine, request([4] * 9, "a")) == answer([4] * 9, 1)
        await engine.control.sleep(level=1).result()
        assert engine.adapters.bytes
        await engine.control.sleep(level=2).result()
        assert engine.adapters.bytes == 0
        assert engine.adapters.unload("a")
        await engine.adapters.load("a", "a")
        await engine.control.resume().result()
        assert await ask(engine, request([4] * 9, "a")) == answer([4] * 9, 2)


async def test_a_frozen_request_continues_with_its_adapter_after_a_deep_sleep():
    executor = FakeExecutor(depth=2)
    async with serving(executor) as engine:
        await engine.adapters.load("a", "a")
        asking = asyncio.create_task(ask(engine, request([4] * 9, "a", 40)))
        await until_steps(engine, 5)
        await engine.control.sleep("keep", level=2).result()
        await engine.control.resume().result()
        assert await asking == answer([4] * 9, 1, 40)
