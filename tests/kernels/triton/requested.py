"""Print the kernels that a model's first steps request, and the kernels that only other possible steps request.

A separate program, because the test process runs Triton's interpreter: `python -m tests.kernels.triton.requested
CHECKPOINT [CACHED [DTYPE]]` prints two lines of JSON: the kernels that only other steps request, and the number of
kernels that the first steps request. Nothing is compiled.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import triton

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.triton.compiled import compiling, target
from infd.request import Adapter, Breakers, Chain, Dry, Mirostat, SamplingParams
from infd.runner.start import warming
from infd.scheduler.plan import Load, StepPlan
from tests.runner.driving import join, span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.models.parameter import Target
    from infd.runner.adapters import DeviceSlots
    from infd.runner.start.trial import TrialPlans

ROWS = 40
PAGE = 16
ASKED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 9},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "allowed_token_ids": (3, 4)},
    {"temperature": 1.0, "top_p": 0.9, "logit_bias": {3: 1.0}},
    {"temperature": 1.0, "top_p": 0.9, "chain": Chain(xtc_probability=0.5)},
    {"temperature": 0.0, "dry": Dry(0.5, 1.2, 1, 7, Breakers((b"\3\0\0\0", b"\5\0\0\0"), ((7, 8),)))},
    {"temperature": 1.0, "mirostat": Mirostat(1, 5.0, 0.1)},
    {"temperature": 1.0, "mirostat": Mirostat(2, 5.0, 0.1), "top_p": 0.9},
]


@contextmanager
def noted() -> Iterator[set[str]]:
    """Yield the set of kernels requested within the block, which are not compiled."""
    found: set[str] = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(f"{fn.name} {compile['key']}")
        return True

    triton.knobs.runtime.jit_cache_hook = note
    with compiling(target("sm_90a")):
        yield found
    triton.knobs.runtime.jit_cache_hook = None


def others(plans: TrialPlans, _: str) -> Iterator[StepPlan]:
    """Plan steps of few and many rows, long and short spans, early and late positions."""
    chance = random.Random(1)
    groups = len(plans._groups)
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


CHANGED = [  # one adapter each: targets changed, modules changed in a target, ranks of a module
    (slice(None), 1, 8),
    (slice(1, None, 3), 3, 64),
    (slice(0, None, 2), 2, 5),
    (slice(2, 5), 1, 256),
]


def mixtures(
    plans: TrialPlans, slots: DeviceSlots, targets: Sequence[Target], dtype: torch.dtype
) -> Iterator[StepPlan]:
    """Plan steps with each adapter alone and with several: with prompts, and decoding only."""
    adapters = [Adapter(f"a{i}", i) for i in range(len(CHANGED))]
    for adapter, each in zip(adapters, CHANGED, strict=True):
        slots.hold(adapter, changes(targets, dtype, *each))
    chance = random.Random(2)
    groups = len(plans._groups)
    for number in range(40):
        wanted = chance.sample(range(1, 5), chance.choice([1, 1, 2, 4]))
        loads = [Load(slot, chance.choice(adapters)) for slot in wanted]
        rows, known = chance.choice([1, 2, 3, 5, 17, ROWS]), chance.choice([1, 3, 17, 40])
        count = chance.choice([1, known])
        joins = [join(row, [5] * known, [[1] * -(-known // PAGE)] * groups) for row in range(rows)]
        for each in joins:
            each.slot = chance.choice([0, *wanted])
        joins[0].slot = wanted[0]
        yield StepPlan(number, joins, [], [span(row, known - count, count) for row in range(rows)], loads)


def changes(targets: Sequence[Target], dtype: torch.dtype, some: slice, most: int, rank: int) -> dict[Target, LowRank]:
    found = {}
    for each in targets[some]:
        outputs = list(each.modules.values())[:most]
        ranks = rank * len(outputs)
        stack = (each.experts,) if each.experts else ()
        a = torch.zeros(*stack, *((each.inputs, ranks) if each.table else (ranks, each.inputs)), dtype=dtype)
        parts = [
            LowRankPart(torch.zeros(*stack, count, rank, dtype=dtype), rank * i, sum(outputs[:i]))
            for i, count in enumerate(outputs)
        ]
        found[each] = LowRank(a, parts)
    return found


def settings(checkpoint: str, cached: Any = "auto", dtype: Any = "auto") -> Config:
    return Config(
        model=ModelConfig(path=checkpoint, dtype=dtype),
        device=DeviceConfig(kind="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=ROWS),
        cache=CacheConfig(page_tokens=PAGE, dtype=cached),
    )


def main(checkpoint: str, *given: Any) -> None:
    with noted() as first:
        warming.issue(settings(checkpoint, *given))
    warming.first_steps, warming.adapted_steps = others, mixtures
    with noted() as later:
        warming.issue(settings(checkpoint, *given))
    print(json.dumps(sorted(later - first)))
    print(len(first))


if __name__ == "__main__":
    main(*sys.argv[1:])
