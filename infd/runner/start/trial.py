"""Plan steps for a runner that serves nobody yet, and run them.

They are ordinary plans, on rows and pages that no sequence holds. `calibration.py` measures them, `budget.py` finds out
what memory they take, and `warming.py` compiles the kernels that they call.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from infd.request import Generate, SamplingParams, Score
from infd.rounding import ceil_div
from infd.scheduler.plan import Join, Span, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.request import Want
    from infd.runner.runner import Runner
    from infd.scheduler.layout import CacheLayout

FIRST = 4  # tokens of the first step, which sets up what is set up on first use
LENGTHS = (1537, 200)  # tokens of prompts whose attention is split over programs, and is not
WAYS = (  # of sampling; kernels differ by the dtype of logits, which is float32 once they are changed
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9),
    SamplingParams(
        max_tokens=1, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, allowed_token_ids=(0,)
    ),
    SamplingParams(max_tokens=1, temperature=1.0, allowed_token_ids=(0,)),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, allowed_token_ids=(0,)),
)


class TrialPlans:
    """Plans of any number of tokens, within the pages and rows of a runner."""

    def __init__(self, layout: CacheLayout, *, pages: int, rows: int, max_model_len: int) -> None:
        self._groups = layout.groups
        self._divisible = layout.divisible
        self._pages = pages
        self._length = max_model_len - 1  # one place is for the token sampled
        self._rows = rows

    @property
    def room(self) -> int:
        """Return how many tokens one plan can hold."""
        if not self._groups:
            return self._rows * self._length
        held = sum(ceil_div(self._length, group.page_tokens) for group in self._groups)
        whole = min(self._rows, self._pages // held)
        return whole * self._length if whole else self._alone()

    def plan(self, tokens: int, scored: int | None = None) -> StepPlan:
        """Return a step of `tokens` prompt tokens, in as few sequences as hold them.

        scored  as Score.top; None: not scored
        """
        plan = StepPlan(-1, [], [], [])
        wants: tuple[Want, ...] = (Generate(WAYS[0]),) if scored is None else (Generate(WAYS[0]), Score(scored))
        page = 1
        while tokens:
            row, count = len(plan.joins), min(tokens, self._length)
            join, page = self._join(row, count, wants, page)
            plan.joins.append(join)
            scores = 0 if scored is None else count - 1
            plan.spans.append(Span(row, 0, count, samples=True, scores=scores))
            tokens -= count
        return plan

    def chunked(self, tokens: int, sampling: SamplingParams) -> list[StepPlan]:
        """Return three steps that compute one prompt in chunks: most of it, then some more, then its last token.

        tokens  of the prompt, at most; fewer where there is no room. Below 4 tokens there are no steps
        """
        tokens = min(tokens, self._length, self.room)
        if tokens < 4 or not self._divisible:
            return []
        join, _ = self._join(0, tokens, (Generate(sampling),), 1)
        bounds = [0, tokens - 1 - tokens // 3, tokens - 1, tokens]
        return [
            StepPlan(-1, [] if start else [join], [], [Span(join.row, start, end - start, samples=end == tokens)])
            for start, end in pairwise(bounds)
        ]

    def _join(self, row: int, tokens: int, wants: tuple[Want, ...], page: int) -> tuple[Join, int]:
        """Return the join of a sequence that holds pages from `page` on, and the next page that is free."""
        tables = []
        for group in self._groups:
            held = ceil_div(tokens, group.page_tokens)
            tables.append(list(range(page, page + held)))
            page += held
        return Join(row, [0] * tokens, tokens, wants, tables, 0), page

    def _alone(self) -> int:
        """Return how many tokens of one sequence fit if no page behind a window is freed yet."""
        return self._pages // len(self._groups) * min(group.page_tokens for group in self._groups)


def first_steps(plans: TrialPlans, device: str) -> Iterator[StepPlan]:
    """Plan the steps that set up what is set up on first use: the smallest step, and on a GPU some more.

    On a GPU kernels are compiled at their first call. Few long sequences call other kernels than short ones, and each
    way of sampling calls its own. Together these steps call every kernel: no later step calls another one.
    """
    yield plans.plan(min(FIRST, plans.room))
    if device == "cuda":
        for tokens in LENGTHS:
            yield from plans.chunked(tokens, WAYS[0])
        for sampling in WAYS[1:]:
            yield from plans.chunked(FIRST, sampling)


def warm_up(runner: Runner, plans: TrialPlans, device: str) -> None:
    """Run the first steps, so that no request waits for what they set up."""
    for plan in first_steps(plans, device):
        run(runner, plan)


def run(runner: Runner, plan: StepPlan) -> float:
    """Compute a step and return the seconds it took. Raises what its rows failed with: then the model is broken."""
    started = time.perf_counter()
    result = runner.read(runner.sample(runner.forward(plan)))
    for fault in result.failed.values():
        raise fault.error()
    return time.perf_counter() - started
