"""Memory released and restored in place: its size, its content, and failures."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.errors import CheckpointError, OutOfMemory
from infd.executors.local import LocalExecutor
from infd.kernels.cpu.fill import Fill
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.request import SamplingParams
from infd.runner.arenas.arena import HostBank
from infd.scheduler.plan import StepPlan
from infd.weights.checkpoint import TensorFile
from tests.runner.driving import generate, join, request, span
from tests.tiny import make

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from infd.scheduler.layout import Capacity
    from infd.weights.parts import FilePart

MIB = 2**20
NOTHING = Memory(weights=Residency.RELEASED, cache=Residency.RELEASED)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6] * 20, [7] * 33]


@asynccontextmanager
async def running(
    directory: Path, *, cache: int = MIB, quantization: str = "none", weights_root: str = "/"
) -> AsyncIterator[tuple[LocalExecutor, Capacity]]:
    runs = LocalExecutor(
        Config(
            model=ModelConfig(
                path=str(directory), dtype="float32", quantization=quantization, weights_root=weights_root
            ),
            device=DeviceConfig(kind="cpu", threads=1),
            scheduler=SchedulerConfig(max_num_seqs=4, step_tokens=64),
            cache=CacheConfig(bytes=cache, page_tokens=4),
        )
    )
    try:
        yield runs, await runs.load()
    finally:
        await runs.close()


async def answers(runs: LocalExecutor, capacity: Capacity) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    return await generate(runs, capacity, [request(prompt, sampling) for prompt in PROMPTS])


def other(directory: Path, target: Path, factor: float = -0.5) -> Path:
    """Save a checkpoint of the model with other weights."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name: (w * factor if "proj" in name else w) for name, w in weights.items()}, target / "model.safetensors"
    )
    return target


def resident() -> int:
    """Return the anonymous and shared memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


async def test_weights_and_touched_cache_go_back_to_the_system_and_answers_stay_the_same(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 5500, "num_hidden_layers": 2}
    directory = make("qwen3", tmp_path, **sizes, num_key_value_heads=4, head_dim=64)
    async with running(directory, cache=24 * MIB) as (runs, capacity):
        before = await answers(runs, capacity)
        page_bytes = runs.describe()["cache_bytes"] // (capacity.pages + 1)
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        await generate(runs, capacity, [request([i] * 500, sampling) for i in range(100, 103)])
        touched = 3 * 500 // 4 * page_bytes
        weights = runs.describe()["weights_bytes"]
        assert weights > 64 * MIB
        assert touched > 5 * MIB

        full = resident()
        assert await runs.sleep(1) > 0.95 * touched
        assert full - resident() > 0.95 * touched
        assert runs.memory == Memory(cache=Residency.RELEASED)
        assert await runs.sleep(2) > 0.95 * weights
        assert full - resident() > 0.95 * (weights + touched)
        assert runs.memory == NOTHING

        asleep = resident()
        await runs.wake(ALL)
        assert runs.memory == Memory()
        assert resident() - asleep > 0.95 * weights
        assert await answers(runs, capacity) == before


async def test_weights_that_were_quantized_are_quantized_again(built, tmp_path):
    directory = make("qwen3", tmp_path, hidden_size=256, intermediate_size=2000, num_hidden_layers=2)
    async with running(directory) as (runs, _):
        plain_bytes = runs.describe()["weights_bytes"]
    async with running(directory, quantization="int8") as (runs, capacity):
        assert runs.describe()["quantization"] == "int8"
        assert 0.25 < runs.describe()["weights_bytes"] / plain_bytes < 0.3
        before = await answers(runs, capacity)
        await runs.sleep(2)
        assert runs.memory == NOTHING
        await runs.wake(ALL)
        assert await answers(runs, capacity) == before
        await runs.load_weights(str(other(directory, tmp_path / "other")))
        assert await answers(runs, capacity) != before


async def test_released_weights_are_not_settled(tiny):
    async with running(tiny("qwen3")) as (runs, _):
        while not runs.describe()["large_pages"]["ended"]:
            await asyncio.sleep(0)
        await runs.sleep(1)
        assert "large_pages" in runs.describe(), "the weights stay"
        await runs.sleep(2)
        assert "large_pages" not in runs.describe()
        await runs.wake(ALL)
        assert runs.describe()["large_pages"].keys() == {"bytes", "of", "ended"}


async def test_a_step_without_memory_fails_instead_of_computing_zeros(tiny):
    async with running(tiny("llama")) as (runs, capacity):
        before = await answers(runs, capacity)
        plan = StepPlan(0, [join(0, [3, 4], [[1]])], [], [span(0, 0, 2)])
        ahead, sleeping = runs.forward(plan).sample(), runs.sleep(1)
        await sleeping
        assert (await ahead).tokens, "it was issued before"
        with pytest.raises(RuntimeError, match="memory is released"):
            await runs.forward(plan).sample()
        await runs.wake(ALL)
        assert await answers(runs, capacity) == before


async def test_a_staged_wake_restores_the_named_parts(tiny):
    async with running(tiny("llama")) as (runs, capacity):
        before = await answers(runs, capacity)
        await runs.sleep(2)
        await runs.wake({MemoryPart.WEIGHTS})
        assert runs.memory == Memory(cache=Residency.RELEASED)
        with pytest.raises(RuntimeError, match="memory is released"):
            await runs.forward(StepPlan(0, [join(0, [3], [[1]])], [], [span(0, 0, 1)])).sample()
        await runs.wake({MemoryPart.CACHE})
        assert await answers(runs, capacity) == before


async def test_a_missing_checkpoint_keeps_the_model_asleep_until_it_is_back(tiny, tmp_path):
    directory = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    async with running(directory) as (runs, capacity):
        before = await answers(runs, capacity)
        await runs.sleep(2)
        os.rename(directory, tmp_path / "elsewhere")
        for _ in range(3):
            with pytest.raises(CheckpointError, match="No such file"):
                await runs.wake(ALL)
            assert runs.memory == NOTHING
        os.rename(tmp_path / "elsewhere", directory)
        await runs.wake(ALL)
        assert await answers(runs, capacity) == before


async def test_a_changed_checkpoint_is_refused_unless_it_is_named(tiny, tmp_path):
    directory = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    async with running(directory) as (runs, capacity):
        before = await answers(runs, capacity)
        await runs.sleep(2)
        other(tiny("llama"), directory)
        with pytest.raises(CheckpointError, match=r"model.safetensors changed since .*infdctl load-weights"):
            await runs.wake(ALL)
        assert runs.memory == NOTHING
        await runs.load_weights(str(directory))
        await runs.wake({MemoryPart.CACHE})
        after = await answers(runs, capacity)
        await runs.sleep(2)
        await runs.wake(ALL)
        assert await answers(runs, capacity) == after != before
    async with running(directory) as (fresh, capacity):
        assert await answers(fresh, capacity) == after


async def test_a_wake_that_fails_midway_holds_no_memory_and_can_be_tried_again(tiny, monkeypatch):
    async with running(tiny("llama")) as (runs, capacity):
        before = await answers(runs, capacity)
        await runs.sleep(2)
        failing(monkeypatch, after=4)
        with pytest.raises(CheckpointError, match="became shorter"):
            await runs.wake(ALL)
        assert runs.memory == NOTHING
        assert not await runs.between(lambda parts: bool(parts.residence.weights.content.any()))
        monkeypatch.undo()
        await runs.wake(ALL)
        assert await answers(runs, capacity) == before


async def test_a_wake_without_room_is_refused_before_a_byte_is_read(tiny, monkeypatch):
    async with running(tiny("llama")) as (runs, _):
        await runs.sleep(2)
        monkeypatch.setattr(HostBank, "free", lambda bank: 1000)
        with pytest.raises(OutOfMemory, match="free memory and wake again"):
            await runs.wake(ALL)
        assert runs.memory == NOTHING


def failing(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Let files end after so many reads of weights, or parts that native code reads."""
    read, left, native = TensorFile.read, [after], Fill.__call__

    def fails(self: TensorFile, buffer: memoryview, offset: int) -> None:
        if offset > 8 and len(buffer) > 4 and offset != 8:
            left[0] -= 1
            if left[0] < 0:
                raise CheckpointError(f"{self.path}: the file became shorter while it was read")
        read(self, buffer, offset)

    def cut_short(self: Fill, parts: Sequence[FilePart], report: Callable[[int], None]) -> int | None:
        native(self, parts[:after], report)
        return after if len(parts) > after else None

    monkeypatch.setattr(TensorFile, "read", fails)
    monkeypatch.setattr(Fill, "__call__", cut_short)


async def test_other_weights_are_put_in_place(tiny, tmp_path):
    directory = other(tiny("qwen3"), tmp_path / "other")
    async with running(directory) as (fresh, capacity):
        want = await answers(fresh, capacity)
    async with running(tiny("qwen3")) as (runs, capacity):
        before = await answers(runs, capacity)
        addresses = await runs.between(lambda parts: [p.tensor.data_ptr() for p in parts.residence.model.parameters])
        await runs.load_weights(str(directory))
        assert await answers(runs, capacity) == want != before
        assert addresses == await runs.between(
            lambda parts: [p.tensor.data_ptr() for p in parts.residence.model.parameters]
        )
        await runs.load_weights(str(tiny("qwen3")))
        assert await answers(runs, capacity) == before


async def test_weights_of_another_shape_or_model_are_refused_before_a_byte_moves(tiny, tmp_path):
    wider = make("qwen3", tmp_path / "wider", intermediate_size=96)
    async with running(tiny("qwen3")) as (runs, capacity):
        before = await answers(runs, capacity)
        for path, said in ((wider, r"expected \[80, 48\], found \[96, 48\]"), (tiny("llama"), "takes a restart")):
            with pytest.raises(CheckpointError, match=said):
                await runs.load_weights(str(path))
            assert runs.memory == Memory()
        with pytest.raises(CheckpointError, match="No such file"):
            await runs.load_weights(str(tmp_path / "nowhere"))
        assert await answers(runs, capacity) == before


async def test_weights_that_fail_midway_are_invalid_until_good_ones_are_there(tiny, tmp_path, monkeypatch):
    directory = other(tiny("qwen3"), tmp_path / "other")
    async with running(tiny("qwen3")) as (runs, capacity):
        before = await answers(runs, capacity)
        failing(monkeypatch, after=4)
        with pytest.raises(CheckpointError, match="became shorter"):
            await runs.load_weights(str(directory))
        assert runs.memory == Memory(weights=Residency.INVALID)
        with pytest.raises(RuntimeError):
            await runs.forward(StepPlan(0, [join(0, [3], [[1]])], [], [span(0, 0, 1)])).sample()
        monkeypatch.undo()
        await runs.load_weights(str(tiny("qwen3")))
        assert await answers(runs, capacity) == before


async def test_files_are_closed_on_success_and_failure(tiny, monkeypatch):
    async with running(tiny("llama")) as (runs, _):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await runs.sleep(2)
            await runs.wake(ALL)
            await runs.load_weights(str(tiny("llama")))
        failing(monkeypatch, after=4)
        with pytest.raises(CheckpointError):
            await runs.load_weights(str(tiny("llama")))
        assert len(os.listdir("/proc/self/fd")) == before


async def test_other_weights_must_be_beside_the_first_unless_a_root_is_set(tiny, tmp_path):
    shutil.copytree(tiny("qwen3"), tmp_path / "models" / "served")
    served = tmp_path / "models" / "served"
    beside, elsewhere = other(served, tmp_path / "models" / "beside"), other(served, tmp_path / "elsewhere")
    linked = tmp_path / "linked"
    linked.symlink_to(served)
    for root, path, allowed in (
        ("", beside, True),
        ("", Path("beside"), True),
        ("", elsewhere, False),
        ("", Path("../elsewhere"), False),
        (str(tmp_path / "elsewhere"), beside, False),
        (str(tmp_path / "elsewhere"), elsewhere, True),
        (str(tmp_path / "elsewhere"), served, True),
    ):
        async with running(served) as (runs, _):
            if allowed:
                await runs.load_weights(str(path), root)
                continue
            with pytest.raises(CheckpointError, match="weights_root"):
                await runs.load_weights(str(path), root)
            assert runs.memory == Memory()
