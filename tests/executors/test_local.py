from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from infd.errors import CheckpointError, DeviceLost, OutOfMemory
from infd.executors import device_thread, local
from infd.executors.local import HAND_OVER_S, LocalExecutor
from infd.request import SamplingParams
from infd.runner.arenas.arena import CPU
from infd.runner.arenas.residence import Residence
from infd.runner.runner import Runner
from infd.runner.staging import Pinned
from infd.runner.start.assembly import Loaded
from infd.scheduler.plan import StepPlan
from tests.runner.driving import config, executor, generate, join, request, span
from tests.runner.fake_model import FakeModel, continuation

if TYPE_CHECKING:
    from infd.models.base import Batch
    from infd.scheduler.layout import Capacity


def device_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "infd-device"]


def start(row: int, tokens: list[int], page: int) -> StepPlan:
    """Return a plan that seats a sequence and samples its first token."""
    return StepPlan(0, [join(row, tokens, [[page]])], [], [span(row, 0, len(tokens))])


class Fault:
    """Raises at chosen batches, counted from when it is armed."""

    def __init__(self) -> None:
        self.error = RuntimeError("the kernel said no")
        self.countdown: int | None = None

    def __call__(self, batch: Batch) -> None:
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                raise self.error


class Gate:
    """Stops forward passes until it is opened; `arrived` is set at the first."""

    def __init__(self) -> None:
        self.armed = False
        self.arrived = threading.Event()
        self.open = threading.Event()

    def __call__(self, batch: Batch) -> None:
        if self.armed:
            self.arrived.set()
            self.open.wait()


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2], [7, 1, 8, 2, 8], [1, 4, 1, 4, 2, 1, 3, 5, 6], [6, 9]]


async def expect_continuations(runs: LocalExecutor, capacity: Capacity, window: int | None = None) -> None:
    """Generate greedily from all prompts, close the executor and compare."""
    requests = [
        request(prompt, SamplingParams(max_tokens=4 + 3 * i, temperature=0.0), name=str(i))
        for i, prompt in enumerate(PROMPTS)
    ]
    try:
        answers = await generate(runs, capacity, requests, depth=runs.depth)
    finally:
        await runs.close()
    assert answers == [continuation(prompt, 4 + 3 * i, window=window) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(("depth", "samples", "naps"), [(1, 1, 0), (2, 1, 1), (2, 0, 0)])
async def test_the_event_loop_lets_the_thread_of_an_idle_device_begin_a_step_that_samples(
    depth: int, samples: int, naps: int, monkeypatch: pytest.MonkeyPatch
):
    gate, slept = Gate(), []
    runs = executor(FakeModel(fault=gate), config(rows=2))
    await runs.load()
    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=slept.append))
    runs.depth, runs.decoding_depth, gate.armed = 1, depth, True
    plans = [start(row, [3, 1], row + 1) for row in range(2)]
    for plan in plans:
        plan.spans[0].samples = samples
    steps = [runs.forward(plan) for plan in plans]  # the second follows one in flight
    assert slept == [HAND_OVER_S] * naps
    gate.open.set()
    for step in steps:
        await step.sample()
    await runs.close()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_any_number_of_steps_in_flight_gives_the_same_tokens(depth: int, window: int | None):
    runs = executor(FakeModel(window=window), config(rows=3, depth=depth))
    capacity = await runs.load()
    assert runs.depth == depth
    await expect_continuations(runs, capacity, window)


class Late:
    """An event that completes only when a thread waits for it. waits: the names of those threads"""

    def __init__(self, waits: list[str]) -> None:
        self._waits = waits
        self._passed = False

    def record(self) -> None:
        self._passed = False

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        if not self._passed:
            self._waits.append(threading.current_thread().name)
        self._passed = True


class Carried(Pinned):
    """Carries as to a GPU, from the host to itself."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__(CPU, lambda size: torch.empty(size, dtype=torch.uint8), lambda: Late(waits))

    def up(self, array):
        return super().up(array).clone()


@pytest.mark.parametrize("depth", [2, 3])
async def test_copies_from_a_separate_device_are_awaited_on_another_thread_and_give_the_same_tokens(monkeypatch, depth):
    waits: list[str] = []
    monkeypatch.setattr("infd.runner.start.runners.staging", lambda device: Carried(waits))
    runs = executor(FakeModel(), config(rows=3, depth=depth))
    capacity = await runs.load()
    waits.clear()
    await expect_continuations(runs, capacity)
    assert set(waits) == {"infd-waiter"}
    assert "infd-waiter" not in [thread.name for thread in threading.enumerate()]


async def test_random_sampling_does_not_depend_on_depth_or_neighbours():
    def requests() -> list:
        return [
            request(prompt, SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=i), name=str(i))
            for i, prompt in enumerate(PROMPTS)
        ]

    answers = []
    for depth, rows in ((1, 1), (2, 4)):
        runs = executor(FakeModel(), config(rows=rows, depth=depth))
        capacity = await runs.load()
        answers.append(await generate(runs, capacity, requests(), depth=depth))
        await runs.close()
    assert answers[0] == answers[1]


async def test_forward_runs_while_sampling_waits_for_its_mask():
    gate = Gate()
    runs = executor(FakeModel(fault=gate), config())
    await runs.load()
    gate.armed = True
    step = runs.forward(start(0, [3, 4], 1))
    behind = runs.forward(start(1, [5], 2))
    behind_answer = behind.sample()
    await asyncio.to_thread(gate.arrived.wait)  # the device has begun before any call of sample
    gate.open.set()
    assert not step.future.done()
    assert not behind.future.done()  # steps stay in order

    mask = np.zeros((1, 4), dtype=np.int32)
    mask[0, 1] = 1 << 5
    assert (await step.sample(mask)).tokens == [37]
    assert (await behind_answer).tokens == continuation([5], 1)
    await runs.close()


class Overlapping(Runner):
    """Issues the next step before reading the last, as on a GPU; on a CPU results are available at once."""

    overlaps = True  # type: ignore[assignment]

    def sample(self, forwarded, mask=None):
        self.__class__.overlaps = False
        try:
            return super().sample(forwarded, mask)
        finally:
            self.__class__.overlaps = True

    def diagnose(self, error):
        return error


async def test_with_overlap_a_successful_step_does_not_fail_with_the_next_one(monkeypatch):
    monkeypatch.setattr("infd.runner.start.runners.Runner", Overlapping)
    fault, gate = Fault(), Gate()

    def both(batch):
        gate(batch)
        fault(batch)

    runs = executor(FakeModel(fault=both), config())
    await runs.load()
    gate.armed, fault.countdown = True, 1
    good = runs.forward(start(0, [3], 1)).sample()
    await asyncio.to_thread(gate.arrived.wait)  # so that the next ones are there when the first has been sampled
    bad, behind = runs.forward(start(1, [4], 2)).sample(), runs.forward(start(2, [5], 3)).sample()
    gate.open.set()

    assert (await good).tokens == continuation([3], 1)
    for failed in (bad, behind):
        with pytest.raises(RuntimeError, match="said no"):
            await failed
    assert (await runs.forward(start(1, [4], 2)).sample()).tokens == continuation([4], 1)
    await runs.close()


async def test_a_failed_step_fails_later_steps_in_flight_and_the_next_plan_works():
    fault = Fault()
    model = FakeModel(fault=fault)
    runs = executor(model, config(depth=4))
    await runs.load()
    fault.countdown = 1
    before = model.batches
    steps = [runs.forward(start(row, [row + 3], row + 1)).sample() for row in range(4)]

    assert (await steps[0]).tokens == continuation([3], 1)
    for step in steps[1:]:
        with pytest.raises(RuntimeError) as raised:
            await step
        assert raised.value is fault.error
    assert model.batches == before + 1  # steps after the failed one never ran

    assert (await runs.forward(start(1, [8], 2)).sample()).tokens == continuation([8], 1)
    await runs.close()


async def test_a_step_that_fails_in_sampling_fails_like_any_other():
    class Unsound(FakeModel):
        def logits(self, hidden, adapters=None):
            return super().logits(hidden)[:, :50] if self.fault else super().logits(hidden)

    model = Unsound()
    runs = executor(model, config())
    await runs.load()
    asked = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={90: 1.0})
    model.fault = lambda batch: None
    with pytest.raises(IndexError):
        await runs.forward(StepPlan(0, [join(0, [3], [[1]], asked)], [], [span(0, 0, 1)])).sample()
    model.fault = None
    assert (await runs.forward(start(0, [3], 1)).sample()).tokens == continuation([3], 1)
    await runs.close()


async def test_a_second_failure_is_distinguished_from_the_first():
    fault = Fault()
    runs = executor(FakeModel(fault=fault), config())
    await runs.load()
    for message in ("first", "second"):
        fault.error, fault.countdown = RuntimeError(message), 0
        with pytest.raises(RuntimeError, match=message):
            await runs.forward(start(0, [3], 1)).sample()
    await runs.close()


async def test_steps_dropped_without_being_awaited_log_nothing(caplog: pytest.LogCaptureFixture):
    fault = Fault()
    runs = executor(FakeModel(fault=fault), config())
    await runs.load()
    fault.countdown = 0
    first = runs.forward(start(0, [3], 1)).sample()
    runs.forward(start(1, [4], 2)).sample()
    with pytest.raises(RuntimeError):
        await first
    await runs.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_the_device_thread_ends_on_close_and_close_may_be_repeated():
    runs = executor(FakeModel(), config())
    await runs.load()
    assert device_threads()
    await runs.close()
    await runs.close()
    assert not device_threads()


async def test_close_does_not_wait_for_a_word_to_sample():
    gate = Gate()
    gate.open.set()
    runs = executor(FakeModel(fault=gate), config())
    await runs.load()
    gate.armed = True
    step = runs.forward(start(0, [3], 1))
    await asyncio.to_thread(gate.arrived.wait)
    await runs.close()
    with pytest.raises(DeviceLost):
        await step.sample()
    assert not device_threads()


async def test_close_stops_a_step_between_two_layers():
    gate = Gate()
    runs = executor(FakeModel(fault=gate), config())
    await runs.load()
    gate.armed = True
    answer = runs.forward(start(0, [3], 1)).sample()
    await asyncio.to_thread(gate.arrived.wait)
    closing = asyncio.ensure_future(runs.close())
    await asyncio.sleep(0)
    gate.open.set()
    await closing
    with pytest.raises(DeviceLost):
        await answer


async def test_a_closed_executor_answers_plans_with_an_error():
    runs = executor(FakeModel(), config())
    await runs.load()
    await runs.close()
    with pytest.raises(DeviceLost):
        await runs.forward(start(0, [3], 1)).sample()


async def test_close_before_load_does_nothing():
    await executor(FakeModel(), config()).close()


async def test_an_error_while_loading_is_raised_by_load_and_ends_the_thread():
    def refuse(settings, pulse):
        raise OutOfMemory("no room")

    runs = LocalExecutor(config(), refuse)
    with pytest.raises(OutOfMemory, match="no room"):
        await runs.load()
    await runs.close()
    assert not device_threads()


async def test_closing_while_loading_stops_at_the_next_piece():
    reached, go_on = threading.Event(), threading.Event()

    def slow(settings, pulse):
        reached.set()
        go_on.wait()
        pulse.beat(1, 2)
        raise AssertionError("went on after close")

    runs = LocalExecutor(config(), slow)
    loading = asyncio.ensure_future(runs.load())
    await asyncio.to_thread(reached.wait)
    closing = asyncio.ensure_future(runs.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    with pytest.raises(DeviceLost):
        await loading


async def test_a_checkpoint_that_is_not_there_is_a_start_error(tmp_path):
    from infd.config import Config, DeviceConfig, ModelConfig

    runs = LocalExecutor(Config(model=ModelConfig(path=str(tmp_path)), device=DeviceConfig(kind="cpu")))
    with pytest.raises(CheckpointError):
        await runs.load()
    await runs.close()


async def test_a_cancelled_wait_does_not_disturb_the_step_behind():
    gate = Gate()
    runs = executor(FakeModel(fault=gate), config())
    await runs.load()
    gate.armed = True
    first = asyncio.ensure_future(runs.forward(start(0, [3], 1)).sample())
    second = runs.forward(start(1, [4], 2)).sample()
    await asyncio.to_thread(gate.arrived.wait)
    first.cancel()
    gate.open.set()
    assert (await second).tokens == continuation([4], 1)
    await runs.close()


async def test_the_executor_describes_the_loaded_model():
    runs = executor(FakeModel(), config())
    assert runs.describe()["device"] == "cpu"
    before = runs.pulse()
    await runs.load()
    facts = runs.describe()
    assert facts["cache_bytes"] > 0
    assert facts["torch"]
    assert runs.pulse() > before
    await runs.close()


async def test_an_errand_runs_behind_the_steps_issued_before_it_and_before_the_next_one():
    model, gate = FakeModel(), Gate()
    model.fault = gate
    runs = executor(model, config(depth=2))
    await runs.load()
    gate.armed, before = True, model.batches
    first = runs.forward(start(0, [3], 1)).sample()
    await asyncio.to_thread(gate.arrived.wait)
    call = runs.between(lambda loaded: (threading.current_thread().name, model.batches, loaded.capacity.rows))
    second = runs.forward(start(1, [4], 2)).sample()
    gate.open.set()

    assert await call == ("infd-device", before + 1, 4)
    assert (await first).tokens == continuation([3], 1)
    assert (await second).tokens == continuation([4], 1)
    await runs.close()


async def test_an_errand_that_fails_harms_no_step():
    def refuse(loaded):
        raise ValueError("no")

    runs = executor(FakeModel(), config(depth=3))
    await runs.load()
    before = runs.forward(start(0, [3], 1)).sample()
    call = runs.between(refuse)
    behind = runs.forward(start(1, [4], 2)).sample()
    with pytest.raises(ValueError, match="no"):
        await call
    assert ((await before).tokens, (await behind).tokens) == (continuation([3], 1), continuation([4], 1))
    await runs.close()


async def test_an_errand_pending_at_close_fails():
    gate = Gate()
    runs = executor(FakeModel(fault=gate), config())
    with pytest.raises(DeviceLost):
        await runs.between(lambda loaded: None)
    await runs.load()
    gate.armed = True
    runs.forward(start(0, [3], 1)).sample()
    await asyncio.to_thread(gate.arrived.wait)
    call = runs.between(lambda loaded: None)
    closing = asyncio.ensure_future(runs.close())
    await asyncio.sleep(0)
    gate.open.set()
    await closing
    with pytest.raises(DeviceLost):
        await call


async def test_with_overlap_an_errand_finds_the_steps_before_it_read(monkeypatch):
    monkeypatch.setattr("infd.runner.start.runners.Runner", Overlapping)
    runs = executor(FakeModel(), config(depth=2))
    await runs.load()
    step = runs.forward(start(0, [3], 1)).sample()
    assert await runs.between(lambda loaded: "done") == "done"
    assert step.done()
    await runs.close()


async def test_the_residence_is_quiet_while_nothing_is_computed(monkeypatch):
    runs = executor(FakeModel(), config())
    await runs.load()
    residence = await runs.between(lambda loaded: loaded.residence)
    assert await asyncio.to_thread(residence.quiet.wait, 60)
    assert not await runs.between(lambda loaded: loaded.residence.quiet.is_set())
    monkeypatch.setattr(device_thread, "IDLE_S", 600)
    assert (await runs.forward(start(0, [3], 1)).sample()).tokens == continuation([3], 1)
    assert not residence.quiet.is_set()
    await runs.close()


async def test_work_deferred_to_an_idle_moment_is_done_then(monkeypatch):
    calls = iter([True, True, False])
    done = threading.Event()

    def idle(loaded):
        return next(calls, None) or done.set() or False

    monkeypatch.setattr(Loaded, "idle", idle)
    runs = executor(FakeModel(), config())
    await runs.load()
    await asyncio.to_thread(done.wait)
    assert (await runs.forward(start(0, [3], 1)).sample()).tokens == continuation([3], 1)
    await runs.close()


async def test_a_sleep_that_fails_leaves_a_device_that_works(monkeypatch):
    def refuse(residence, level):
        raise OSError("locked pages")

    monkeypatch.setattr(Residence, "sleep", refuse)
    runs = executor(FakeModel(), config())
    await runs.load()
    with pytest.raises(OSError, match="locked pages"):
        await runs.sleep(1)
    assert runs.memory.whole
    assert (await runs.forward(start(0, [5, 6, 7], page=1)).sample()).accepted == [1]
    await runs.close()


async def test_no_step_starts_while_memory_changes_even_if_no_caller_awaits_the_change(monkeypatch):
    arrived, released = threading.Event(), threading.Event()

    def slow(residence, level):
        arrived.set()
        released.wait()
        return 0

    monkeypatch.setattr(Residence, "sleep", slow)
    runs = executor(FakeModel(), config())
    await runs.load()
    sleeping = asyncio.create_task(runs.sleep(1))
    await asyncio.to_thread(arrived.wait)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    with pytest.raises(RuntimeError, match="memory is released"):
        await runs.forward(start(0, [5, 6, 7], page=1)).sample()
    released.set()
    await runs.close()
