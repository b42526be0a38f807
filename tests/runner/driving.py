"""Put runners together over the fake model, and drive them with the real scheduler."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from infd.config import CacheConfig, Config, DeviceConfig, SchedulerConfig
from infd.drafting.drafter import NO_DRAFTS
from infd.executors.local import LocalExecutor
from infd.kernels.select import CANDIDATES, insisting, select
from infd.request import Generate, Request, SamplingParams, Score
from infd.runner.adapters import DeviceSlots
from infd.runner.arenas.arena import CPU, Arena, HostBank
from infd.runner.arenas.weights_source import WeightsSource
from infd.runner.instance import Instance
from infd.runner.pulse import Pulse
from infd.runner.rows import Rows
from infd.runner.staging import staging
from infd.runner.start.assembly import assemble
from infd.runner.start.runners import Runners
from infd.runner.start.setup import ModelSetup
from infd.scheduler.plan import Join, Span
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from tests.runner.fake_model import FakeModel, HistoryAttention

if TYPE_CHECKING:
    from infd.drafting.drafter import Drafter
    from infd.engine.executor import Executor
    from infd.request import Want
    from infd.runner.arenas.arena import Bank
    from infd.runner.staging import Staging
    from infd.runner.start.assembly import Loaded
    from infd.scheduler.layout import CacheLayout, Capacity
    from infd.scheduler.scheduler import Scheduled

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def config(*, rows: int = 4, step_tokens: int = 8, depth: int = 1) -> Config:
    """Return settings in which a page of the fake model, 4 tokens of two layers, has 64 bytes."""
    return Config(
        device=DeviceConfig(kind="cpu", threads=1, depth=depth),
        scheduler=SchedulerConfig(max_num_seqs=rows, step_tokens=step_tokens),
        cache=CacheConfig(bytes=2**16, page_tokens=4),
    )


def load(
    model: FakeModel,
    settings: Config,
    pulse: Pulse,
    *,
    max_len: int = 48,
    bank: Bank | None = None,
    described: dict[str, Any] | None = None,
) -> Loaded:
    ops = select(CPU, torch.float32, insisting("reference", CANDIDATES))
    setup = ModelSetup(model, ops.replace(attention=HistoryAttention()), torch.float32, CPU, max_len)
    bank = bank or HostBank()
    if described is None:  # no calibration is stored
        settings = replace(settings, device=replace(settings.device, kernel_cache=""))
    source = WeightsSource(Path(), described or {}, {}, Path())
    return assemble(Runners(settings, setup, bank, pulse), bank, Arena(64, CPU, "weights"), source)


def executor(model: FakeModel, settings: Config) -> LocalExecutor:
    def build(settings: Config, pulse: Pulse) -> Loaded:
        loaded = load(model, settings, pulse)
        # On a busy machine a scored token may be measured to cost a whole step.
        return replace(loaded, capacity=replace(loaded.capacity, score_cost=1))

    return LocalExecutor(settings, build)


def wants(
    sampling: SamplingParams | None, scored: int | None, end_ids: frozenset[int] = frozenset()
) -> tuple[Want, ...]:
    """Return the wants of a request; None: it does not generate, its prompt is not scored."""
    generate = () if sampling is None else (Generate(sampling, end_ids),)
    return generate if scored is None else (*generate, Score(scored))


def request(
    prompt: list[int],
    sampling: SamplingParams | None = GREEDY,
    *,
    scored: int | None = None,
    name: str = "r",
    **fields: object,
) -> Request:
    return Request(id=name, prompt=tuple(prompt), wants=wants(sampling, scored), **fields)  # type: ignore[arg-type]


def join(
    row: int,
    tokens: list[int],
    tables: list[list[int]],
    sampling: SamplingParams = GREEDY,
    *,
    prompt: int | None = None,
    scored: int | None = None,
    end_ids: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Join:
    prompt_tokens = len(tokens) if prompt is None else prompt
    return Join(row, tokens, prompt_tokens, wants(sampling, scored, end_ids), tables, seed)


def span(row: int, start: int, count: int, *, samples: int = 1, scores: int = 0) -> Span:
    return Span(row, start, count, samples, scores)


def instance(model: Any, layout: CacheLayout, rows: Rows) -> Instance:
    """Return a model over rows, without pages and adapters, to gather a plan's batch for."""
    ops = select(CPU, torch.float32).replace(attention=HistoryAttention())
    return Instance(model, ops, layout, cache=[], rows=rows, adapters=DeviceSlots(None, staging(CPU)), pulse=Pulse())


def make_rows(
    *,
    rows: int = 4,
    max_len: int = 32,
    page_tokens: tuple[int, ...] = (4,),
    vocab_size: int = 101,
    copies: Staging | None = None,
) -> Rows:
    copies = staging(CPU) if copies is None else copies
    return Rows(rows=rows, max_len=max_len, page_tokens=page_tokens, vocab_size=vocab_size, staging=copies)


async def generate(
    runs: Executor,
    capacity: Capacity,
    requests: list[Request],
    *,
    depth: int = 1,
    drafters: list[Drafter] | None = None,
    max_drafts: int = 0,
) -> list[list[int]]:
    """Serve requests with `depth` steps in flight; return each request's generated tokens.

    drafters  one for each request; None: no drafts
    """
    sequences = [
        Sequence(each, drafter=drafter)
        for each, drafter in zip(requests, drafters or [NO_DRAFTS] * len(requests), strict=True)
    ]
    await finish(runs, Scheduler(capacity, max_drafts=max_drafts), sequences, depth=depth)
    return [seq.tokens[seq.prompt_tokens :] for seq in sequences]


async def finish(runs: Executor, scheduler: Scheduler, sequences: list[Sequence], *, depth: int = 1) -> None:
    """Run sequences to their ends, with `depth` steps in flight."""
    for seq in sequences:
        scheduler.add(seq)
    in_flight: deque[tuple[Scheduled, object]] = deque()
    while True:
        while len(in_flight) < depth and (step := scheduler.plan()) is not None:
            in_flight.append((step, runs.forward(step.plan).sample()))
        if not in_flight:
            return
        step, result = in_flight.popleft()
        scheduler.commit(step, await result)  # type: ignore[misc]
        scheduler.verify()
