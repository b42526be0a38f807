"""Say which kernels a model's first steps ask for, and which ones any others do that the scheduler may plan.

A program of its own, since its parent interprets: `python -m tests.kernels.triton.asking CHECKPOINT` prints two lines
of JSON, the kernels that only other steps ask for and how many the first ones do. Nothing is compiled.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import triton

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.kernels.triton.compiled import compiling, target
from infd.request import SamplingParams
from infd.runner import warming
from infd.scheduler.plan import StepPlan
from tests.runner.driving import join, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.runner.stepsize import Trial

ROWS = 40
PAGE = 16
ASKED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 9},
    {"temperature": 0.0, "logprobs": 2},
]


@contextmanager
def noted() -> Iterator[set[str]]:
    """Return what is asked for in here, instead of compiling it."""
    found: set[str] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(f"{fn.name} {compile['key']}")
        return True

    triton.knobs.runtime.jit_cache_hook = note
    with compiling(target("sm_90a")):
        yield found
    triton.knobs.runtime.jit_cache_hook = None


def others(trial: Trial, _: str) -> Iterator[StepPlan]:
    """Plan steps of few rows and of many, of long spans and of short ones, far into a sequence and at its start."""
    chance = random.Random(1)
    groups = len(trial._groups)
    for number in range(120):
        joins, spans = [], []
        rows = chance.choice([1, 2, 3, 7, ROWS])
        for row in range(rows):
            known = chance.choice([1, 2, 15, 16, 17, 255, 256, 257, 300, 1024, 1900])
            count = min(known, chance.choice([1, 1, 1, 2, 16, 33, 128, 640, 1900]))
            sampling = SamplingParams(max_tokens=1, **chance.choice(ASKED))
            tables = [[1] * -(-known // PAGE)] * groups
            joins.append(join(row, [5] * known, tables, sampling))
            spans.append(span(row, known - count, count, samples=chance.random() < 0.8))
        yield StepPlan(number, joins, [], spans)


class Never:
    """Has decoding steps computed from lasting buffers, kernel by kernel."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def settings(checkpoint: str, cached: Any = "auto") -> Config:
    return Config(
        model=ModelConfig(path=checkpoint),
        device=DeviceConfig(kind="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=ROWS),
        cache=CacheConfig(page_tokens=PAGE, dtype=cached),
    )


def main(checkpoint: str, *cached: Any) -> None:
    with noted() as first:
        warming.issue(settings(checkpoint, *cached))
    warming.first_steps = others
    with noted() as later:
        warming.issue(settings(checkpoint, *cached))
        warming.issue(settings(checkpoint, *cached), Never())
    print(json.dumps(sorted(later - first)))
    print(len(first))


if __name__ == "__main__":
    main(*sys.argv[1:])
