"""A model on a GPU that sleeps and wakes: the real runner over books that a driver keeps, computed by the CPU."""

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
class House:
    """A model on a device whose books can be read."""

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
            StepPlan(0, [join(0, prompt, [[1, 2, 3]])], [], [span(0, 0, 5, samples=False)]),
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
    """Serve a checkpoint from a GPU's memory; it has pieces so small that every arena has several."""
    monkeypatch.setattr(vram, "PIECE", 8 * GRAIN)

    def start(directory: Path | None = None, capacity: int = 2**30) -> House:
        driver, pulse = FakeDriver(capacity=capacity), Pulse()
        monkeypatch.setattr(loading, "bank_of", lambda device: Bank(driver))
        config = Config(
            model=ModelConfig(path=str(directory or tiny("qwen3")), dtype="float32"),
            device=DeviceConfig(kind="cpu", threads=1),
            scheduler=SchedulerConfig(max_num_seqs=4, step_tokens=64),
            cache=CacheConfig(bytes=CACHE, page_tokens=4),
        )
        return House(loading.build(config, pulse), driver, pulse)

    return start


def test_a_light_sleep_moves_weights_to_the_host_and_the_wake_reads_no_file(serve, tiny, tmp_path):
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "model"))
    house = serve(directory)
    before, weights = house.answer(), house.weights()
    assert house.residence.released_by(1) == ALL
    beats = house.pulse.count
    freed = house.residence.sleep(1)
    assert freed == _whole(house.residence.weights.size) + _whole(house.residence.cache.size)
    assert house.memory == PARKED
    assert house.driver.used == 0
    assert house.pulse.count > beats, "a watcher must not take it for stuck"
    house.audit()
    assert house.residence.resident == {"context_and_others": 0}
    shutil.rmtree(directory)
    house.residence.wake(ALL)
    house.audit()
    assert house.memory == Memory()
    assert house.residence.resident == {}
    assert house.weights().equal(weights)
    assert house.answer() == before


@pytest.mark.parametrize("level", [1, 2])
def test_workspaces_are_released_with_the_cache_and_return_zeroed_at_the_same_address(serve, monkeypatch, level):
    lent: list[Tensor] = []
    monkeypatch.setattr(loading, "candidates", lambda config: insisting("reference", CANDIDATES))
    monkeypatch.setattr(PagedAttention, "workspace_bytes", 3 * GRAIN, raising=False)
    monkeypatch.setattr(PagedAttention, "work_in", lambda attention, memory: lent.append(memory), raising=False)
    house = serve()
    (memory,) = lent  # the runner that is tried first computes there, too
    assert memory.shape == (3 * GRAIN,)
    with torch.inference_mode():
        memory.fill_(7)
    before, held = house.answer(), house.driver.used
    house.residence.sleep(level)
    assert house.driver.used == 0
    capacity, house.driver.capacity = house.driver.capacity, _whole(house.residence.cache.size) + GRAIN
    with pytest.raises(OutOfMemory, match="kernel workspaces"):
        house.residence.wake({MemoryPart.CACHE})
    assert house.driver.used == 0
    house.driver.capacity = capacity
    house.residence.wake(ALL)
    assert house.driver.used == held
    assert not memory.any()
    assert house.answer() == before
    house.driver.audit()


def test_a_deep_sleep_drops_weights_and_the_wake_reads_them_again(serve):
    house = serve()
    before, weights = house.answer(), house.weights()
    for level in (2, 1):
        house.residence.sleep(level)
        assert house.memory == NOTHING, "what is gone cannot be moved"
        house.audit()
    house.residence.wake(ALL)
    house.audit()
    assert house.weights().equal(weights)
    assert house.answer() == before


def test_a_light_sleep_may_deepen(serve):
    house = serve()
    before = house.answer()
    house.residence.sleep(1)
    house.residence.sleep(1)
    assert house.memory == PARKED
    house.audit()
    house.residence.sleep(2)
    assert house.memory == NOTHING
    house.audit()
    house.residence.wake(ALL)
    assert house.answer() == before


def test_weights_that_the_host_cannot_park_are_read_again(serve, monkeypatch, caplog):
    house = serve()
    before = house.answer()
    monkeypatch.setattr(vram, "available_bytes", lambda: 1000)
    house.residence.sleep(1)
    assert house.memory == NOTHING
    assert "so wake reads them from disk" in caplog.text
    house.audit()
    house.residence.wake(ALL)
    assert house.answer() == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_staged_wake_restores_the_named_parts(serve, level):
    house = serve()
    before = house.answer()
    for first, second in ((MemoryPart.WEIGHTS, MemoryPart.CACHE), (MemoryPart.CACHE, MemoryPart.WEIGHTS)):
        house.residence.sleep(level)
        house.residence.wake({first})
        assert house.memory.released == {second}
        assert house.residence.resident
        house.audit()
        house.residence.wake({first})
        house.residence.wake({second})
        assert house.memory.whole
        house.audit()
        assert house.answer() == before


def test_a_wake_that_finds_the_device_full_holds_nothing_and_can_be_tried_again(serve):
    house = serve()
    before = house.answer()
    all_of_it = house.driver.capacity
    for level in (1, 2):
        house.residence.sleep(level)
        asleep = house.memory
        for room in (0, CACHE // 2, CACHE + GRAIN):
            house.driver.capacity = room
            with pytest.raises(OutOfMemory, match=r"MiB"):
                house.residence.wake(ALL)
            assert house.memory == asleep
            assert house.driver.used == 0
            house.audit()
        house.driver.capacity = all_of_it
        house.residence.wake(ALL)
        assert house.answer() == before


def test_other_weights_may_replace_parked_ones(serve, tiny):
    house = serve()
    before = house.answer()
    house.residence.sleep(1)
    with pytest.raises(CheckpointError):
        house.residence.load("nowhere")
    assert house.memory == PARKED
    house.audit()
    house.residence.load(str(tiny("qwen3")))
    assert house.memory == Memory(cache=Residency.RELEASED)
    house.audit()
    house.residence.wake(ALL)
    assert house.answer() == before


def test_closing_releases_all_memory(serve):
    for level in (0, 1, 2):
        house = serve()
        if level:
            house.residence.sleep(level)
        house.residence.close()
        assert house.driver.used == 0
        assert not house.driver.registered


@pytest.mark.parametrize("error", ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_lost_device_does_not_keep_it_from_closing(serve, caplog, asleep, error):
    house = serve()
    if asleep:
        house.residence.sleep(1)
    house.driver.fails = lambda call: error
    house.residence.close()
    assert caplog.text.count("could not be") == (1 if asleep else 2)
    house.driver.fails = lambda call: None


def test_a_model_that_is_gone_leaves_nothing_on_the_device(serve):
    house = serve()
    driver = house.driver
    assert driver.ranges
    house.loaded = None
    gc.collect()
    assert not driver.ranges
    assert driver.used == 0


def test_a_model_that_does_not_fit_is_refused_and_leaves_nothing(serve):
    house = serve()
    weights = _whole(house.residence.weights.size)
    for capacity, purpose in ((weights - GRAIN, "weights"), (weights + CACHE // 2, "cache")):
        with pytest.raises(OutOfMemory, match=purpose):
            serve(capacity=capacity)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_in_a_history_of_sleeps_and_wakes_the_books_balance(serve, tiny, seed, monkeypatch):
    house, chance = serve(), random.Random(seed)
    residence, driver = house.residence, house.driver
    before, weights = house.answer(), house.weights()
    trouble = Trouble(chance)
    driver.fails = trouble
    fill = vram.available_bytes()
    monkeypatch.setattr(vram, "available_bytes", lambda: chance.choice([fill, 1000]) if trouble.likely else fill)
    failures = 0
    for _ in range(60):
        trouble.likely = chance.choice([0.0, 0.0, 0.02, 0.2])
        was = house.memory
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
                assert house.memory.released >= was.released - ({MemoryPart.WEIGHTS} if act == "load" else set())
        if house.memory.weights is Residency.LOADED:
            assert house.weights().equal(weights)
        if house.memory.whole:
            assert house.answer() == before
    driver.fails = lambda call: None
    residence.sleep(2)
    house.audit()
    residence.wake(ALL)
    house.audit()
    assert house.answer() == before
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
