"""Adapters through the whole engine on real tensors: answers equal PEFT's, and unloading frees memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, LiveConfig, LoraConfig, ModelConfig, SchedulerConfig
from infd.engine.engine import Engine
from infd.errors import RequestFailed
from infd.executors.local import LocalExecutor
from infd.request import Generate, Request, SamplingParams
from infd.runner.adapters import DeviceSlots
from infd.telemetry.metrics import Metrics
from tests.adapters.making import EVERY_PRODUCT, make
from tests.engine.driving import running
from tests.tiny import VOCAB, continuation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from torch import Tensor

    from infd.runner.start.assembly import Loaded
    from infd.scheduler.plan import Load

NEW = 12
PROMPTS = [
    torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (3, 40, 17, 1, 33, 8, 25)
]


@asynccontextmanager
async def serving(checkpoint: Path, *, depth: int = 1, per_step: int = 16, slots: int = 16) -> AsyncIterator[Engine]:
    config = Config(
        model=ModelConfig(path=str(checkpoint), dtype="float32", max_model_len=64),
        device=DeviceConfig(kind="cpu", threads=1, depth=depth),
        scheduler=SchedulerConfig(step_tokens=48, max_num_seqs=8),
        cache=CacheConfig(bytes=2**20, page_tokens=4),
        lora=LoraConfig(max_adapters=slots, max_adapters_per_step=per_step),
    )
    async with running(Engine(LiveConfig(config), LocalExecutor(config), Metrics(), names=("base",))) as engine:
        yield engine


async def generate(engine: Engine, prompt: list[int], adapter: str | None) -> list[int]:
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0)
    request = Request(id="r", prompt=tuple(prompt), wants=(Generate(sampling),), adapter=adapter)
    async with engine.admit(1, 0) as ticket:
        return [token async for _, delta in await ticket.submit(request) for token in delta.token_ids]


SETTINGS: dict[str, dict[str, object]] = {
    "a": {"seed": 1, "target_modules": "all-linear"},
    "b": {"seed": 2, "r": 9, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "c": {"seed": 3, "r": 2, "layers_to_transform": [1], "use_rslora": True},
}


class Expected:
    """Adapters of one checkpoint, and PEFT's generated tokens with each."""

    def __init__(self, checkpoint: Path, root: Path) -> None:
        self.root = root
        self.answers: dict[tuple[str, int], tuple[list[int], int]] = {}
        for name, settings in SETTINGS.items():
            model = make(checkpoint, root / name, **settings)  # type: ignore[arg-type]
            for number, prompt in enumerate(PROMPTS):
                self.answers[name, number] = continuation(model, prompt, NEW)
        doubtful = sum(NEW - clear for _, clear in self.answers.values())
        assert doubtful < 0.2 * NEW * len(self.answers)


@pytest.fixture(scope="module")
def expected(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tiny("qwen3"), tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(("depth", "per_step", "slots"), [(1, 16, 16), (2, 2, 2), (1, 1, 1)])
async def test_greedy_answers_are_those_of_peft_however_many_adapters_share_a_step(
    tiny: Callable[[str], Path], expected: Expected, depth: int, per_step: int, slots: int
) -> None:
    async with serving(tiny("qwen3"), depth=depth, per_step=per_step, slots=slots) as engine:
        for name in SETTINGS:
            await engine.adapters.load(name, str(expected.root / name))
        asked = [(name, number) for number in range(len(PROMPTS)) for name in SETTINGS]
        answers = await asyncio.gather(*(generate(engine, PROMPTS[number], name) for name, number in asked))
        plain = await generate(engine, PROMPTS[1], None)

    for each, answer in zip(asked, answers, strict=True):
        theirs, clear = expected.answers[each]
        assert answer[:clear] == theirs[:clear], each
    assert plain not in [answer for (_, number), answer in zip(asked, answers, strict=True) if number == 1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("error", [RequestFailed("no room for it"), MemoryError("no room")], ids=["told", "memory"])
async def test_an_adapter_that_fails_to_load_on_the_device_fails_only_its_own_requests(
    tiny: Callable[[str], Path], expected: Expected, depth: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = DeviceSlots.fill

    def refuse(self: DeviceSlots, loads: list[Load]) -> None:
        if any(load.adapter.name == "b" for load in loads):
            raise error
        fill(self, loads)

    async with serving(tiny("qwen3"), depth=depth) as engine:
        for name in SETTINGS:
            await engine.adapters.load(name, str(expected.root / name))
        asked = [(name, number) for number in range(3) for name in SETTINGS]
        with monkeypatch.context() as patched:
            patched.setattr(DeviceSlots, "fill", refuse)
            answers = await asyncio.gather(*(generate(engine, PROMPTS[number], name) for name, number in asked))
        later = await generate(engine, PROMPTS[0], "b")
        assert engine.status().terminal["error"] == 3

    for (name, number), answer in [*zip(asked, answers, strict=True), (("b", 0), later)]:
        theirs, clear = expected.answers[name, number]
        if answer is later or name != "b":
            assert answer[:clear] == theirs[:clear], (name, number)
        else:
            assert answer == []


def first_factor(parts: Loaded) -> weakref.ref[Tensor]:
    (low,) = parts.runner.adapters._host.values()
    return weakref.ref(next(iter(low.values())).a)


async def test_unloading_frees_the_tensors_after_the_last_request(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = tiny("llama")
    make(checkpoint, tmp_path, target_modules=[*EVERY_PRODUCT, "lm_head"])
    async with serving(checkpoint, depth=2) as engine:
        await engine.adapters.load("a", str(tmp_path))
        factor = await engine.executor.between(first_factor)  # type: ignore[attr-defined]
        answers = [asyncio.create_task(generate(engine, prompt, "a")) for prompt in PROMPTS]
        while not engine.status().running:
            await asyncio.sleep(0)
        engine.adapters.unload("a")
        assert all(len(answer) == NEW for answer in await asyncio.gather(*answers))
        await engine.adapters.wait_until_unused("a")
        await engine.executor.between(lambda parts: None)  # type: ignore[attr-defined]

        gc.collect()
        assert factor() is None
        assert engine.adapters.bytes == 0


async def test_reloads_race_requests_on_real_tensors(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = tiny("llama")
    models = {name: make(checkpoint, tmp_path / name, seed=seed, r=3) for seed, name in enumerate("xy")}
    expected = {name: continuation(model, PROMPTS[1], NEW) for name, model in models.items()}
    clear = min(clear for _, clear in expected.values())
    async with serving(checkpoint, depth=2, slots=2) as engine:
        await engine.adapters.load("a", str(tmp_path / "x"))

        async def client() -> list[int]:
            return await generate(engine, PROMPTS[1], "a")

        async def operator() -> None:
            for turn in range(12):
                await engine.adapters.load("a", str(tmp_path / "xy"[turn % 2]), in_place=True)
                if turn % 5 == 0:
                    engine.adapters.store()

        answers, _ = await asyncio.gather(asyncio.gather(*(client() for _ in range(40))), operator())
        assert all(any(answer[:clear] == theirs[:clear] for theirs, _ in expected.values()) for answer in answers), (
            "an answer of neither generation"
        )
        assert not [row for row in engine.adapters.rows() if row.state == "leaving"]
