"""Greedy answers through the whole engine equal transformers' `generate`, in any mix of requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from infd.config import CacheConfig, Config, DeviceConfig, LiveConfig, ModelConfig, SchedulerConfig
from infd.engine.engine import Engine
from infd.executors.local import LocalExecutor
from infd.request import Generate, Request, SamplingParams
from infd.telemetry.metrics import Metrics
from tests.engine.driving import running
from tests.tiny import FAMILIES, FURTHER, MIXTURES, VOCAB, continuation, oracle
from tests.weights.encodings.fixtures import SOME, WRITTEN, unpacked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

NEW = 24


class Expected:
    """Prompts, and transformers' tokens after each; clear[i] counts leading tokens with a clear margin."""

    def __init__(self, directory: Path, vocab: int = VOCAB) -> None:
        model = oracle(directory)
        generator = torch.Generator().manual_seed(9)
        lengths = [3, 40, 17, 1, 64, 33, 8, 25, 50, 12, 5, 29]
        self.prompts = [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
        self.answers: list[list[int]] = []
        self.clear: list[int] = []
        for prompt in self.prompts:
            answer, clear = continuation(model, prompt, NEW)
            self.answers.append(answer)
            self.clear.append(clear)

    def compare(self, got: list[list[int]]) -> None:
        """Assert equal tokens up to the first unclear margin, and few skipped positions."""
        skipped = sum(NEW - clear for clear in self.clear)
        assert skipped <= 0.15 * NEW * len(self.prompts), f"{skipped} positions of {NEW * len(self.prompts)} skipped"
        for ours, theirs, clear in zip(got, self.answers, self.clear, strict=True):
            assert len(ours) == NEW
            assert ours[:clear] == theirs[:clear]


@cache
def expected_of(directory: Path) -> Expected:
    return Expected(directory)


# Windows and sinks, chunks, then every other mixture of experts.
MIXED = ("gpt-oss", "llama4")
REST = [pytest.param(each, marks=pytest.mark.exhaustive) for each in sorted(set(MIXTURES) - FURTHER - set(MIXED))]


@pytest.fixture(scope="module", params=[*FAMILIES, *MIXED, *REST])
def checkpoint(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> tuple[Path, Expected]:
    directory = tiny(request.param)
    return directory, expected_of(directory)


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    step_tokens: int = 256,
    rows: int = 16,
    cache_bytes: int = 2**20,
    depth: int = 1,
    exact_activations: bool = False,
) -> AsyncIterator[Engine]:
    config = Config(
        model=ModelConfig(path=str(directory), dtype="float32", max_model_len=128, exact_activations=exact_activations),
        device=DeviceConfig(kind="cpu", threads=1, depth=depth),
        scheduler=SchedulerConfig(step_tokens=step_tokens, max_num_seqs=rows),
        cache=CacheConfig(bytes=cache_bytes, page_tokens=4),
    )
    async with running(Engine(LiveConfig(config), LocalExecutor(config), Metrics())) as engine:
        yield engine


async def generate(engine: Engine, prompt: list[int]) -> list[int]:
    wants = (Generate(SamplingParams(max_tokens=NEW, temperature=0.0)),)
    request = Request(id="r", prompt=tuple(prompt), wants=wants)
    async with engine.admit(1, 0) as ticket:
        return [token async for _, delta in await ticket.submit(request) for token in delta.token_ids]


async def begun(engine: Engine, prompts: list[list[int]]) -> list[asyncio.Task[list[int]]]:
    """Return the futures of answers to submitted requests."""
    answers = [asyncio.create_task(generate(engine, prompt)) for prompt in prompts]
    inside = engine.status().accepted + len(prompts)
    while engine.status().accepted < inside:
        await asyncio.sleep(0)
    return answers


async def disturbed(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers, for which half of the running sequences are preempted every five steps."""
    answers = [asyncio.create_task(generate(engine, prompt)) for prompt in prompts]
    scheduler, seen = engine.core.scheduler, 0
    while not all(answer.done() for answer in answers):
        await asyncio.sleep(0)
        if engine.status().steps // 5 > seen:
            seen += 1
            for seq in scheduler.running[::2]:
                scheduler.preempt(seq)
    assert engine.status().preemptions > 10
    return [answer.result() for answer in answers]


async def test_alone(checkpoint: tuple[Path, Expected]) -> None:
    directory, expected = checkpoint
    async with serving(directory) as engine:
        expected.compare([await generate(engine, prompt) for prompt in expected.prompts])


@pytest.mark.parametrize("depth", [1, 2])
async def test_batched_with_other_requests(checkpoint: tuple[Path, Expected], depth: int) -> None:
    directory, expected = checkpoint
    async with serving(directory, depth=depth) as engine:
        expected.compare(await asyncio.gather(*(generate(engine, prompt) for prompt in expected.prompts)))


async def test_in_chunks(checkpoint: tuple[Path, Expected]) -> None:
    directory, expected = checkpoint
    async with serving(directory, step_tokens=13, rows=7) as engine:
        expected.compare(await asyncio.gather(*(generate(engine, prompt) for prompt in expected.prompts)))
        assert engine.status().steps > sum(map(len, expected.prompts)) // 13


async def test_after_preemption_for_lack_of_pages(tiny: Callable[[str], Path]) -> None:
    directory = tiny("qwen3")
    expected = expected_of(directory)
    page_bytes = 3 * 2 * 2 * 4 * 16 * 4  # layers, k and v, heads, page_tokens, head_dim, float32
    async with serving(directory, cache_bytes=44 * page_bytes) as engine:
        expected.compare(await asyncio.gather(*(generate(engine, prompt) for prompt in expected.prompts)))
        assert engine.status().preemptions > 0


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
async def test_after_preemption_at_any_moment(checkpoint: tuple[Path, Expected], depth: int) -> None:
    directory, expected = checkpoint
    async with serving(directory, depth=depth) as engine:
        expected.compare(await disturbed(engine, expected.prompts))


@pytest.mark.parametrize("name", SOME)
async def test_answers_with_encoded_weights_survive_chunks_and_preemption(name: str, tmp_path: Path) -> None:
    expected = Expected(unpacked(name, tmp_path), vocab=64)
    async with serving(WRITTEN / name, step_tokens=13, rows=7, exact_activations=True) as engine:
        expected.compare(await disturbed(engine, expected.prompts))


async def test_with_a_warm_prefix_cache(checkpoint: tuple[Path, Expected]) -> None:
    directory, expected = checkpoint
    async with serving(directory) as engine:
        for _ in range(2):
            expected.compare(await asyncio.gather(*(generate(engine, prompt) for prompt in expected.prompts)))
        status = engine.status()
        assert status.prefix_hits > 0.3 * status.prefix_queries


async def test_through_pauses_at_any_moment(checkpoint: tuple[Path, Expected]) -> None:
    directory, expected = checkpoint
    async with serving(directory, depth=2) as engine:
        undisturbed = await asyncio.gather(*(generate(engine, prompt) for prompt in expected.prompts))
        engine.core.forget_prefixes(preempting=False)
        answers = await begun(engine, expected.prompts)
        while not all(answer.done() for answer in answers):
            await engine.control.pause("keep").result()
            steps = engine.status().steps
            await engine.control.resume().result()
            while engine.status().steps < steps + 3 and not all(answer.done() for answer in answers):
                await asyncio.sleep(0)
    assert [answer.result() for answer in answers] == undisturbed


@pytest.mark.parametrize("level", [1, 2])
async def test_through_sleeps_at_any_moment(tiny: Callable[[str], Path], level: int) -> None:
    expected = expected_of(tiny("qwen3"))
    async with serving(tiny("qwen3"), depth=2) as engine:
        answers = await begun(engine, expected.prompts)
        sleeps = frozen = 0
        while not all(answer.done() for answer in answers):
            move = engine.control.sleep("keep", level)
            await move.result()
            sleeps, frozen = sleeps + 1, frozen + move.frozen
            steps = engine.status().steps
            await engine.control.wake().result()
            while engine.status().steps < steps + 4 and not all(answer.done() for answer in answers):
                await asyncio.sleep(0)
        expected.compare([answer.result() for answer in answers])
        assert sleeps > 4
        assert frozen > 10


async def test_with_the_prefix_cache_reset_at_any_moment(tiny: Callable[[str], Path]) -> None:
    expected = expected_of(tiny("qwen3"))
    async with serving(tiny("qwen3"), depth=2) as engine:
        answers = await begun(engine, expected.prompts * 2)
        forgotten, steps = 0, 0
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(0)
            if engine.status().steps > steps + 3:
                steps, forgotten = engine.status().steps, forgotten + 1
                engine.core.forget_prefixes(preempting=bool(forgotten % 2))
        expected.compare([answer.result() for answer in answers][: len(expected.prompts)])
        expected.compare([answer.result() for answer in answers][len(expected.prompts) :])
        assert forgotten > 4
