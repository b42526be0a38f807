"""The budget of a GPU's memory: arithmetic, and starts over the fake driver."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from msgspec.structs import replace

from infd.config import CacheConfig, Config, DeviceConfig, LoraConfig, SchedulerConfig
from infd.errors import OutOfMemory
from infd.runner.cuda_graphs.buffers import sizes
from infd.runner.pulse import Pulse
from infd.runner.rows import Rows
from infd.runner.start import runners
from infd.runner.start.budget import GRAPH_BYTES, MIB, Budget, Footprint
from tests.runner.cuda_driver import GRAIN, Bank, FakeDriver
from tests.runner.driving import load
from tests.runner.fake_model import FakeModel

if TYPE_CHECKING:
    from infd.models.base import Batch
    from infd.runner.start.assembly import Loaded

TOTAL = 700 * GRAIN
PAGE = 64  # bytes, of the fake model


def start(
    driver: FakeDriver,
    *,
    fits: int = 1000,
    step_tokens: int | None = 64,
    share: float = 0.5,
    wanted: int | None = None,
    graphs: bool = False,
    keeps: int = 0,
    adapters: str = "",
    speculative: Literal["off", "ngram"] = "off",
) -> tuple[Loaded, Bank]:
    """Start on a device.

    fits      tokens of the largest step for which it has memory
    keeps     bytes that a captured step keeps
    adapters  the directory that they may be loaded from
    """

    def full(batch: Batch) -> None:
        if len(batch.tokens) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    bank = Bank(driver, grains=2)
    bank.keeps = keeps
    settings = Config(
        lora=LoraConfig(root=adapters),
        device=DeviceConfig(kind="cpu", threads=1, memory_utilization=share, graphs=graphs),
        scheduler=SchedulerConfig(max_num_seqs=40, step_tokens=step_tokens, speculative=speculative),
        cache=CacheConfig(bytes=wanted, page_tokens=4),
    )
    return load(FakeModel(fault=full), settings, Pulse(), bank=bank, max_len=2000), bank


def test_the_cache_gets_the_rest_of_the_memory_share():
    budget = Budget(total=1000, others=100, share=0.9, weights=300, footprint=Footprint(64, 50, 30, 20, 3), graphs=40)
    assert budget.room.bytes == 810 - 300 - 20 - 50 - 40
    assert replace(budget, weights=900).room.bytes == 0


def test_the_budgets_lines_add_up():
    budget = Budget(
        total=1000 * MIB,
        others=100 * MIB,
        share=0.9,
        weights=300 * MIB,
        footprint=Footprint(64, 50 * MIB, 30 * MIB, 20 * MIB, 3 * MIB),
        graphs=40 * MIB,
    )
    first, total, *lines = budget.explain(budget.room.bytes).splitlines()
    assert "the GPU's memory" in first
    numbers = [int(line.split()[0].replace(",", "")) for line in lines]
    assert sum(numbers) == int(total.split()[0].replace(",", "")) == 1000
    assert numbers == [100, 300, 20, 50, 40, 400, 90]
    assert "of at most 64 tokens" in lines[3]
    assert "90%" in lines[-1]


def test_a_start_tries_the_largest_step_and_leaves_only_weights_and_cache(caplog):
    caplog.set_level("INFO", "infd.runner")
    driver = FakeDriver(capacity=TOTAL)
    loaded, bank = start(driver)
    assert bank.tried == [64, 40], "the largest step, and one in which every row decodes"
    room = TOTAL // 2 - 2 * GRAIN * 64
    cache = loaded.facts["cache_bytes"]
    assert room - 3 * GRAIN < cache <= room
    driver.audit()
    assert len(driver.ranges) == 1, "the weights' arena is not of this bank, and the first cache is gone"
    assert driver.used - cache < GRAIN
    assert "steps of at most 64 tokens" in caplog.text
    assert "50% of the GPU, less weights and steps" in caplog.text
    assert loaded.capacity.step_tokens == 64


def test_the_largest_step_that_verifies_drafts_is_tried_too():
    loaded, bank = start(FakeDriver(capacity=TOTAL), step_tokens=130, speculative="ngram")
    assert bank.tried == [130, 40, 120], "of 7 drafts 2 have room"
    assert loaded.capacity.row_costs
    _, bank = start(FakeDriver(capacity=TOTAL), step_tokens=64, speculative="ngram")
    assert bank.tried == [64, 40], "none has room"


def test_memory_is_reserved_for_captured_steps():
    loaded, _ = start(FakeDriver(capacity=300 * MIB), graphs=True, share=1.0)
    graphs = 2 * 2 * GRAIN * 40 + len(sizes(40)) * GRAPH_BYTES
    useful = 40 * 500 * PAGE
    assert 300 * MIB - graphs > useful, "or the test shows nothing"
    assert loaded.facts["cache_bytes"] >= useful
    with pytest.raises(OutOfMemory, match="the cache has room for 0 pages"):
        start(FakeDriver(capacity=graphs), graphs=True, share=1.0)


@pytest.mark.parametrize(("keeps", "adapters", "each"), [(9 * MIB, "", 9), (MIB, "", 8), (MIB, "/adapters", 16)])
def test_each_graph_is_estimated_as_the_first_one_and_twice_with_adapters(keeps, adapters, each):
    # Workspaces, the trial's memory, and the largest step's.
    graphs = len(sizes(40)) * each * MIB + 3 * 2 * GRAIN * 40
    spare = 2**17
    loaded, _ = start(
        FakeDriver(capacity=graphs + spare), graphs=True, share=1.0, keeps=keeps, adapters=adapters, step_tokens=4
    )
    assert spare - 4 * GRAIN < loaded.facts["cache_bytes"] <= spare


def test_rows_are_counted_and_those_of_the_first_runner_are_gone_before_there_are_others(monkeypatch):
    driver, held = FakeDriver(capacity=TOTAL), []

    class Held(Rows):
        """Rows whose memory the fake driver tracks."""

        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            held.append(driver.used)
            self.memory = Bank(driver).arena(50 * GRAIN, "rows").take((50 * GRAIN,), torch.uint8)

    monkeypatch.setattr(runners, "Rows", Held)
    gc.disable()
    try:
        loaded, _ = start(driver)
    finally:
        gc.enable()
    cache = loaded.facts["cache_bytes"]
    room = TOTAL // 2 - 2 * GRAIN * 64 - 50 * GRAIN
    assert room - 3 * GRAIN < cache <= room
    _, before = held
    assert before - cache < GRAIN
    assert driver.used - before == 50 * GRAIN


def test_memory_of_other_processes_is_not_part_of_the_share():
    driver = FakeDriver(capacity=TOTAL)
    first, _ = start(driver)
    second, _ = start(driver)
    room = (TOTAL - first.facts["cache_bytes"]) // 2 - 2 * GRAIN * 64
    assert room - 3 * GRAIN < second.facts["cache_bytes"] <= room


def test_a_step_that_does_not_fit_is_halved_until_one_does(caplog):
    driver = FakeDriver(capacity=4 * TOTAL)
    loaded, bank = start(driver, fits=300, step_tokens=1024)
    assert bank.tried == [256, 40]
    assert loaded.capacity.step_tokens == 256
    assert "more than 256 tokens do not fit" in caplog.text
    measured, _ = start(driver, fits=300, step_tokens=None)
    assert measured.capacity.step_tokens <= 256


def test_a_device_on_which_no_step_fits_is_refused_and_left_as_it_was():
    driver = FakeDriver(capacity=TOTAL)
    with pytest.raises(OutOfMemory, match="no memory for a step of 64 tokens beside the weights"):
        start(driver, fits=10)
    gc.collect()
    assert (driver.used, driver.ranges) == (0, {})


def test_a_cache_of_a_given_size_is_that_large_whatever_the_share():
    driver = FakeDriver(capacity=TOTAL)
    loaded, _ = start(driver, wanted=2**17, share=0.1)
    assert 2**17 - PAGE - 512 <= loaded.facts["cache_bytes"] <= 2**17
