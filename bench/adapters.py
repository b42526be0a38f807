"""Measure the cost of adapters in a decoding step, with and without rows that use one."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import click
import torch
from native_kernels import require_native_kernels

from infd import embedded
from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.request import Adapter, Generate, SamplingParams
from infd.runner.pulse import Pulse
from infd.runner.start.loading import build
from infd.scheduler.plan import Join, Load, Span, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.models.parameter import Target

PROMPT = 16
WANTS = (Generate(SamplingParams(max_tokens=1, temperature=0.0)),)


def weights(targets: Iterable[Target], rank: int, dtype: torch.dtype) -> dict[Target, LowRank]:
    """Return an adapter with random factors for every product."""
    low = {}
    for target in targets:
        if target.table:
            continue
        parts, output = [], 0
        for number, outputs in enumerate(target.modules.values()):
            parts.append(LowRankPart(torch.randn(outputs, rank, dtype=dtype) * 0.01, number * rank, output))
            output += outputs
        low[target] = LowRank(torch.randn(rank * len(parts), target.inputs, dtype=dtype), parts)
    return low


@click.command()
@click.option("--model", default=str(embedded.path()))
@click.option("--dtype", default="float32")
@click.option("--rows", default=8)
@click.option("--rank", default=16)
@click.option("--steps", default=200)
def main(model: str, dtype: str, rows: int, rank: int, steps: int) -> None:
    """Measure decoding steps on one thread."""
    require_native_kernels()
    config = Config(
        model=ModelConfig(path=model, dtype=dtype, max_model_len=64),  # type: ignore[arg-type]
        device=DeviceConfig(kind="cpu", threads=1),
        scheduler=SchedulerConfig(max_num_seqs=rows, step_tokens=256),
        cache=CacheConfig(bytes=2**26, page_tokens=16),
    )
    loaded = build(config, Pulse())
    runner, targets = loaded.runner, loaded.reader._targets
    number = getattr(torch, dtype)

    def step(plan: StepPlan) -> float:
        with runner.active():
            begun = time.thread_time()
            runner.read(runner.sample(runner.forward(plan)))
            return time.thread_time() - begun

    def seat(slots: list[int]) -> None:
        joins = [
            Join(row, [1] * PROMPT, PROMPT, WANTS, [[2 * row + 1, 2 * row + 2]], 0, slots[row]) for row in range(rows)
        ]
        spans = [Span(row, 0, PROMPT, samples=0) for row in range(rows)]
        step(StepPlan(0, joins, [], spans))

    def decode() -> float:
        # Every step decodes the same position, so that all steps are equally long.
        return step(StepPlan(0, [], [], [Span(row, PROMPT - 1, 1, samples=0) for row in range(rows)]))

    def measure(cases: dict[str, list[int]], rounds: int) -> dict[str, list[float]]:
        took: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, slots in cases.items():
                seat(slots)
                decode()
                took[name].append(min(decode() for _ in range(5)))
        return took

    nobody = [0] * rows
    before = measure({"before": nobody, "before again": nobody}, steps // 10)
    slots = 4
    fill = [Load(slot, Adapter("a", slot)) for slot in range(1, slots + 1)]
    for load in fill:
        runner.adapters.hold(load.adapter, weights(targets, rank, number))
    with runner.active():
        runner.adapters.fill(fill)
    cases = {
        "loaded, wanted by none": nobody,
        "wanted by one row": [1, *[0] * (rows - 1)],
        "one, wanted by all": [1] * rows,
        f"{slots}, wanted by all": [1 + row % slots for row in range(rows)],
    }
    after = measure({"none": nobody, **cases}, steps // 10)
    base = statistics.median(before["before"])
    print(f"{model}: {rows} rows, rank {rank}, {dtype}, one thread; a step without adapters {base * 1e3:.2f} ms")
    print(f"  before, twice: {statistics.median(before['before again']) / base:.3f}")
    for name in cases:
        ratios = sorted(took / none for took, none in zip(after[name], after["none"], strict=True))
        spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f}"
        print(f"  {name:<24} {statistics.median(ratios):.3f} ({spread})")


if __name__ == "__main__":
    main()
