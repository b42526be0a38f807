"""Measure the scheduler's plan and commit, per running sequence and step, without a device."""

from __future__ import annotations

import statistics
import time

from infd.drafting.drafter import NO_DRAFTS, Drafting
from infd.drafting.ngram import NgramDrafting
from infd.request import Generate, Request, SamplingParams
from infd.scheduler.layout import CacheLayout, Capacity, PageGroup
from infd.scheduler.plan import StepPlan, StepResult
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence

_PROMPT = 32
_PAGE_TOKENS = 16


def plan_commit_us(
    sequences: int = 256, *, steps: int = 128, repeats: int = 5, drafting: Drafting = NO_DRAFTS, waiting: int = 0
) -> list[float]:
    """Return microseconds per decoding sequence and step, one figure per repeat; includes page grants and drafting.

    waiting  sequences that wait for a row
    """
    return [_once(sequences, steps, drafting, waiting) for _ in range(repeats)]


def _once(sequences: int, steps: int, drafting: Drafting, waiting: int) -> float:
    tokens = _PROMPT + steps * (1 + drafting.most) + 4
    capacity = Capacity(
        layout=CacheLayout((PageGroup(layers=(0,), page_tokens=_PAGE_TOKENS),)),
        pages=sequences * (tokens // _PAGE_TOKENS + 2),
        rows=sequences,
        step_tokens=(sequences + 1) * _PROMPT,  # a token is left when the step is planned
        max_model_len=2 * tokens,
        vocab_size=1 << 15,
    )
    scheduler = Scheduler(capacity, max_drafts=drafting.most)
    for number in range(sequences + waiting):
        prompt = tuple((number + position) % capacity.vocab_size for position in range(_PROMPT))
        wants = (Generate(SamplingParams(max_tokens=tokens)),)
        request = Request(id=str(number), prompt=prompt, wants=wants)
        scheduler.add(Sequence(request, drafter=drafting.drafter(request, b"")))
    first = scheduler.plan()
    assert first is not None
    scheduler.commit(first, _result(first.plan))

    spent = []
    for _ in range(steps):
        begun = time.perf_counter()
        step = scheduler.plan()
        planned = time.perf_counter()
        assert step is not None
        assert len(step.sequences) == sequences
        result = _result(step.plan)
        resumed = time.perf_counter()
        scheduler.commit(step, result)
        spent.append(planned - begun + time.perf_counter() - resumed)
    return 1e6 * statistics.fmean(spent) / sequences


def _result(plan: StepPlan) -> StepResult:
    accepted = [span.samples for span in plan.spans]
    return StepResult(accepted, [plan.number + 7] * sum(accepted))


if __name__ == "__main__":
    for name, drafting, waiting in (
        ("", NO_DRAFTS, 0),
        (", 1,000 waiting", NO_DRAFTS, 1000),
        (", drafts that are kept", NgramDrafting(3), 0),
    ):
        figures = plan_commit_us(drafting=drafting, waiting=waiting)
        us = f"{statistics.median(figures):.2f} us per running sequence ({min(figures):.2f} at best)"
        print(f"plan + commit{name}: {us}")
