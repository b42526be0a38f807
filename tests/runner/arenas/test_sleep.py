"""A model on a GPU that sleeps and wakes: the real runner over the fake driver, computed by the CPU."""

from __future__ import annotations

import gc
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.errors import CheckpointError, DeviceLost, OutOfMemory
from infd.kernels.reference.attention import PagedAttention
from infd.kernels.select import CANDIDATES, insisting
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.runner.arenas import vram
from infd.runner.pulse import Pulse
from infd.runner.start import loading
from infd.scheduler.plan import StepPlan
from tests.runner.cuda_driver import GRAIN, Bank, FakeDriver
from tests.runner.driving import join, span

if TYPE_CHECKING:
    from torch import Tensor

    from infd.runner.arenas.residence import Residence
    from infd.runner.start.assembly import Loaded

PARKED = Memory(weights=Residency.PARKED, cache=Residency.RELEASED)
NOTHING = Memory(weights=Residency.RELEASED, cache=Residency.RELEASED)
MIB = 2**20
CACHE = MIB


@dataclass
class Served:
    """A model served from a FakeDriver's memory."""

    loaded: Loaded
    driver: FakeDriver
    pulse: Pulse

    @property
    def residence(self) -> Residence:
        return self.loaded.residence

    @property
    def memory(self) -> Memory:
        return self.residence.memory

    def answer(self) -> list[int]:
        return answer(self.loaded)

    def weights(self) -> Tensor:
        return self.residence.weights.content.clone()

    def audit(self) -> None:
        """Compare mapped and pinned memory with the reported residency."""
        self.driver.audit()
        sizes = sorted(held.size for held in self.driver.ranges.values())
        there = sum(self.driver.mapped.values())
        expected = [self.memory.weights in (Residency.LOADED, Residency.INVALID), self.memory.cache is Residency.LOADED]
        weights, cache = (_whole(self.residence.weights.size), _whole(self.residence.cache.size))
        assert sizes == sorted([weights, cache])
        assert there == expected[0] * weights + expected[1] * cache
        pinned = sum(self.driver.registered.values())
        assert pinned == (self.residence.weights.used if self.memory.weights is Residency.PARKED else 0)


def answer(loaded: Loaded) -> list[int]:
    """Compute a prompt in two steps, so that the second reads the first one's keys from the cache, and a step more."""
    prompt, tokens = [3, 1, 4, 1, 5, 9, 2, 6], []
    with loaded.runner.active():
        for plan in (
            StepPlan(0, [join(0, prompt, [[1, 2, 3]])], [], [span(0, 0, 5, samples=0)]),
            StepPlan(1, [], [], [span(0, 5, 3)]),
            StepPlan(2, [], [], [span(0, 8, 1)]),
        ):
            result = loaded.runner.read(loaded.runner.sample(loaded.runner.forward(plan)))
            assert not result.failed
            tokens += result.tokens
    return tokens


def _whole(size: int) -> int:
    return -(-size // GRAIN) * GRAIN


@pytest.fixture
def serve(tiny, monkeypatch):
    """Serve a checkpoint from GPU memory, in pieces so small that every arena has several."""
    monkeypatch.setattr(vram, "PIECE", 8 * GRAIN)

    def start(directory: Path | None = None, capacity: int = 2**30) -> Served:
        driver, pulse = FakeDriver(capacity=capacity), Pulse()
        monkeypatch.setattr(loading, "bank_of", lambda device: Bank(driver))
        config = Config(
            model=ModelConfig(path=str(directory or tiny("qwen3")), dtype="float32"),
            device=DeviceConfig(kind="cpu", threads=1),
            scheduler=SchedulerConfig(max_num_seqs=4, step_tokens=64),
            cache=CacheConfig(bytes=CACHE, page_tokens=4),
        )
        return Served(loading.build(config, pulse), driver, pulse)

    return start


def test_a_light_sleep_moves_weights_to_the_host_and_the_wake_reads_no_file(serve, tiny, tmp_path):
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "model"))
    served = serve(directory)
    before, weights = served.answer(), served.weights()
    assert served.residence.released_by(1) == ALL
    beats = served.pulse.count
    freed = served.residence.sleep(1)
    assert freed == _whole(served.residence.weights.size) + _whole(served.residence.cache.size)
    assert served.memory == PARKED
    assert served.driver.used == 0
    assert served.pulse.count > beats, "a watcher must not take it for stuck"
    served.audit()
    assert served.residence.resident == {"context_and_others": 0}
    shutil.rmtree(directory)
    served.residence.wake(ALL)
    served.audit()
    assert served.memory == Memory()
    assert served.residence.resident == {}
    assert served.weights().equal(weights)
    assert served.answer() == before


@pytest.mark.parametrize("level", [1, 2])
def test_workspaces_are_released_with_the_cache_and_return_zeroed_at_the_same_address(serve, monkeypatch, level):
    lent: list[Tensor] = []
    monkeypatch.setattr(loading, "candidates", lambda config: insisting("reference", CANDIDATES))
    monkeypatch.setattr(PagedAttention, "workspace_bytes", 3 * GRAIN, raising=False)
    monkeypatch.setattr(PagedAttention, "work_in", lambda attention, memory: lent.append(memory), raising=False)
    served = serve()
    (memory,) = lent  # the runner that is tried first computes there, too
    assert memory.shape == (3 * GRAIN,)
    with torch.inference_mode():
        memory.fill_(7)
    before, held = served.answer(), served.driver.used
    served.residence.sleep(level)
    assert served.driver.used == 0
    capacity, served.driver.capacity = served.driver.capacity, _whole(served.residence.cache.size) + GRAIN
    with pytest.raises(OutOfMemory, match="kernel workspaces"):
        served.residence.wake({MemoryPart.CACHE})
    assert served.driver.used == 0
    served.driver.capacity = capacity
    served.residence.wake(ALL)
    assert served.driver.used == held
    assert not memory.any()
    assert served.answer() == before
    served.driver.audit()


def test_a_deep_sleep_drops_weights_and_the_wake_reads_them_again(serve):
    served = serve()
    before, weights = served.answer(), served.weights()
    for level in (2, 1):
        served.residence.sleep(level)
        assert served.memory == NOTHING, "what is gone cannot be moved"
        served.audit()
    served.residence.wake(ALL)
    served.audit()
    assert served.weights().equal(weights)
    assert served.answer() == before


def test_a_light_sleep_may_deepen(serve):
    served = serve()
    before = served.answer()
    served.residence.sleep(1)
    served.residence.sleep(1)
    assert served.memory == PARKED
    served.audit()
    served.residence.sleep(2)
    assert served.memory == NOTHING
    served.audit()
    served.residence.wake(ALL)
    assert served.answer() == before


def test_weights_that_the_host_cannot_park_are_read_again(serve, monkeypatch, caplog):
    served = serve()
    before = served.answer()
    monkeypatch.setattr(vram, "available_bytes", lambda: 1000)
    served.residence.sleep(1)
    assert served.memory == NOTHING
    assert "so wake reads them from disk" in caplog.text
    served.audit()
    served.residence.wake(ALL)
    assert served.answer() == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_staged_wake_restores_the_named_parts(serve, level):
    served = serve()
    before = served.answer()
    for first, second in ((MemoryPart.WEIGHTS, MemoryPart.CACHE), (MemoryPart.CACHE, MemoryPart.WEIGHTS)):
        served.residence.sleep(level)
        served.residence.wake({first})
        assert served.memory.released == {second}
        assert served.residence.resident
        served.audit()
        served.residence.wake({first})
        served.residence.wake({second})
        assert served.memory.whole
        served.audit()
        assert served.answer() == before


def test_a_wake_that_finds_the_device_full_holds_no_memory_and_can_be_tried_again(serve):
    served = serve()
    before = served.answer()
    all_of_it = served.driver.capacity
    for level in (1, 2):
        served.residence.sleep(level)
        asleep = served.memory
        for room in (0, CACHE // 2, CACHE + GRAIN):
            served.driver.capacity = room
            with pytest.raises(OutOfMemory, match=r"MiB"):
                served.residence.wake(ALL)
            assert served.memory == asleep
            assert served.driver.used == 0
            served.audit()
        served.driver.capacity = all_of_it
        served.residence.wake(ALL)
        assert served.answer() == before


def test_other_weights_may_replace_parked_ones(serve, tiny):
    served = serve()
    before = served.answer()
    served.residence.sleep(1)
    with pytest.raises(CheckpointError):
        served.residence.load("nowhere")
    assert served.memory == PARKED
    served.audit()
    served.residence.load(str(tiny("qwen3")))
    assert served.memory == Memory(cache=Residency.RELEASED)
    served.audit()
    served.residence.wake(ALL)
    assert served.answer() == before


def test_closing_releases_all_memory(serve):
    for level in (0, 1, 2):
        served = serve()
        if level:
            served.residence.sleep(level)
        served.residence.close()
        assert served.driver.used == 0
        assert not served.driver.registered


@pytest.mark.parametrize("error", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_lost_device_does_not_keep_it_from_closing(serve, caplog, asleep, error):
    served = serve()
    if asleep:
        served.residence.sleep(1)
    served.driver.fails = lambda call: error
    served.residence.close()
    assert caplog.text.count("could not be") == (1 if asleep else 2)
    served.driver.fails = lambda call: None


def test_a_model_that_is_gone_leaves_nothing_on_the_device(serve):
    served = serve()
    driver = served.driver
    assert driver.ranges
    served.loaded = None
    gc.collect()
    assert not driver.ranges
    assert driver.used == 0


def test_a_model_that_does_not_fit_is_refused_and_leaves_nothing(serve):
    served = serve()
    weights = _whole(served.residence.weights.size)
    for capacity, purpose in ((weights - GRAIN, "weights"), (weights + CACHE // 2, "cache")):
        with pytest.raises(OutOfMemory, match=purpose):
            serve(capacity=capacity)


@pytest.mark.parametrize("seed", range(6))
def test_after_any_failure_in_a_history_of_sleeps_and_wakes_all_memory_is_accounted_for(serve, tiny, seed, monkeypatch):
    served, chance = serve(), random.Random(seed)
    residence, driver = served.residence, served.driver
    before, weights = served.answer(), served.weights()
    trouble = Trouble(chance)
    driver.fails = trouble
    fill = vram.available_bytes()
    monkeypatch.setattr(vram, "available_bytes", lambda: chance.choice([fill, 1000]) if trouble.likely else fill)
    failures = 0
    for _ in range(60):
        trouble.likely = chance.choice([0.0, 0.0, 0.02, 0.2])
        was = served.memory
        act = chance.choice(["light", "deep", "wake", "wake", "cache", "weights", "load"])
        try:
            if act in ("light", "deep"):
                residence.sleep(1 if act == "light" else 2)
            elif act == "load":
                residence.load(str(tiny("qwen3")))
            else:
                residence.wake({"wake": ALL, "cache": {MemoryPart.CACHE}, "weights": {MemoryPart.WEIGHTS}}[act])
        except (DeviceLost, OutOfMemory):
            failures += 1
            if act not in ("light", "deep"):
                assert served.memory.released >= was.released - ({MemoryPart.WEIGHTS} if act == "load" else set())
        if served.memory.weights is Residency.LOADED:
            assert served.weights().equal(weights)
        if served.memory.whole:
            assert served.answer() == before
    driver.fails = lambda call: None
    residence.sleep(2)
    served.audit()
    residence.wake(ALL)
    served.audit()
    assert served.answer() == before
    assert failures > 3


class Trouble:
    """Lets calls fail by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.likely = 0.0
        self._chance = chance

    def __call__(self, call: str) -> str | None:
        if self._chance.random() >= self.likely or call == "cuMemGetInfo":
            return None
        return self._chance.choice(["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_on_a_gpu_captured_steps_hold_over_a_sleep_and_the_memory_is_free_meanwhile(tiny, level):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    config = Config(
        model=ModelConfig(path=str(tiny("qwen3")), dtype="float32"),
        device=DeviceConfig(kind="cuda"),
        scheduler=SchedulerConfig(max_num_seqs=4, step_tokens=64),
        cache=CacheConfig(bytes=256 * MIB, page_tokens=4),
    )
    loaded = loading.build(config, Pulse())
    assert loaded.residence.refusal == ""
    with loaded.runner.active():
        while loaded.idle():
            pass
    before = answer(loaded)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    assert loaded.residence.sleep(level) > 250 * MIB
    assert torch.cuda.mem_get_info()[0] - free > 250 * MIB
    assert loaded.residence.resident["graphs"] > 0
    loaded.residence.wake(ALL)
    assert answer(loaded) == before
    loaded.residence.close()
