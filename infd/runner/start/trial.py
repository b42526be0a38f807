"""Plan and run trial steps on a runner that does not serve yet.

Trial steps are ordinary plans, on rows and pages that no sequence uses. `calibration.py` measures the duration of trial
steps, `budget.py` measures their memory, and `warming.py` compiles the kernels that they call.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from infd.request import Breakers, Chain, Dry, Generate, Pool, SamplingParams, Score
from infd.rounding import ceil_div
from infd.scheduler.plan import Join, Span, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.request import PoolTask, Want
    from infd.runner.runner import Runner
    from infd.scheduler.layout import CacheLayout

TRIALS = 5  # most measured steps per number of tokens
ENOUGH_S = 0.05  # after this many seconds of steps of one size, no further step of the size is run, if one was calm
# A step on a CPU is calm if its thread computes for at least this part of its duration. Otherwise other processes use
# the cores: the thread waits for a core, or for a thread that waits for one.
CALM = 0.95
FIRST = 4  # tokens of the first step, in which torch and kernels initialize
LENGTHS = (1537, 200)  # tokens of two prompts; only the first prompt's keys are split over programs
# Steps with these parameters call every sampling kernel, for each dtype of logits: a mask keeps the model's dtype, any
# other change of logits converts them to float32.
WAYS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9),
    SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=(0,)),
    SamplingParams(
        max_tokens=1, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, allowed_token_ids=(0,)
    ),
    SamplingParams(max_tokens=1, temperature=1.0, frequency_penalty=0.1),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, frequency_penalty=0.1),
    SamplingParams(max_tokens=1, temperature=1.0, chain=Chain(typical_p=0.9), dry=Dry(0.1, 1.75, 2, None, Breakers())),
)


class TrialPlans:
    """Plans trial steps of any number of tokens within a runner's pages and rows."""

    def __init__(
        self, layout: CacheLayout, *, pages: int, rows: int, max_model_len: int, task: PoolTask | None = None
    ) -> None:
        """task: the task of pooling; None: prompts are continued."""
        self._groups = layout.groups
        self._divisible = layout.divisible
        self._pages = pages
        self._pool = None if task is None else Pool(task)
        self._length = max_model_len - (task is None)  # leaves a position for a sampled token
        self._rows = rows

    @property
    def room(self) -> int:
        """Return the largest number of tokens that a plan can compute."""
        if not self._groups:
            return self._rows * self._length
        held = sum(ceil_div(self._length, group.page_tokens) for group in self._groups)
        whole = min(self._rows, self._pages // held)
        return whole * self._length if whole else self._alone()

    def plan(self, tokens: int, scored: int | None = None) -> StepPlan:
        """Return a step of `tokens` prompt tokens in the least number of sequences.

        scored  Score.top of the sequences; None: no token is scored
        """
        plan = StepPlan(-1, [], [], [])
        wants: tuple[Want, ...] = self._wants(WAYS[0]) if scored is None else (Generate(WAYS[0]), Score(scored))
        page = 1
        while tokens:
            row, count = len(plan.joins), min(tokens, self._length)
            join, page = self._join(row, count, wants, page)
            plan.joins.append(join)
            scores = 0 if scored is None else count - 1
            plan.spans.append(self._span(row, 0, count, scores=scores))
            tokens -= count
        return plan

    def verifying(self, rows: int) -> StepPlan:
        """Return a step that samples `rows` positions, as a decoding step does, in the least number of sequences."""
        plan, page = StepPlan(-1, [], [], []), 1
        while rows:
            row, count = len(plan.joins), min(rows, self._length)
            join, page = self._join(row, count, (Generate(WAYS[0]),), page)
            plan.joins.append(join)
            plan.spans.append(Span(row, 0, count, samples=count))
            rows -= count
        return plan

    def chunked(self, tokens: int, sampling: SamplingParams) -> list[StepPlan]:
        """Return three steps that compute a prompt in three chunks.

        The first chunk has about two thirds of the tokens, the last chunk one token, the second chunk the other tokens.
        Returns no steps for fewer than 4 tokens, and if the model's prompts must not be divided.

        tokens  tokens of the prompt, reduced to `room` or the longest sequence if necessary
        """
        tokens = min(tokens, self._length, self.room)
        if tokens < 4 or not self._divisible:
            return []
        join, _ = self._join(0, tokens, self._wants(sampling), 1)
        bounds = [0, tokens - 1 - tokens // 3, tokens - 1, tokens]
        return [
            StepPlan(-1, [] if start else [join], [], [self._span(join.row, start, end - start, ends=end == tokens)])
            for start, end in pairwise(bounds)
        ]

    def _wants(self, sampling: SamplingParams) -> tuple[Want, ...]:
        return (Generate(sampling),) if self._pool is None else (self._pool,)

    def _span(self, row: int, start: int, count: int, *, ends: bool = True, scores: int = 0) -> Span:
        """Return a span of a prompt, which it may end."""
        if self._pool is not None:
            return Span(row, start, count, samples=0, pools=count)
        return Span(row, start, count, samples=int(ends), scores=scores)

    def _join(self, row: int, tokens: int, wants: tuple[Want, ...], page: int) -> tuple[Join, int]:
        """Return the join of a sequence, whose pages have ids from `page` on, and the next free id."""
        tables = []
        for group in self._groups:
            held = ceil_div(tokens, group.page_tokens)
            tables.append(list(range(page, page + held)))
            page += held
        return Join(row, [0] * tokens, tokens, wants, tables, 0), page

    def _alone(self) -> int:
        """Return the maximum length of a sequence that has all pages to itself.

        Every group needs pages for all tokens, because trial steps do not free pages outside attention windows.
        """
        return self._pages // len(self._groups) * min(group.page_tokens for group in self._groups)


def first_steps(plans: TrialPlans, device: str) -> Iterator[StepPlan]:
    """Plan the steps that initialize torch and kernels: the smallest step, and on a GPU further steps.

    A GPU's kernels are compiled when they are first called. Sequence lengths and sampling parameters determine which
    kernels a step calls; these steps together call every kernel except those of adapters. Scoring prompt tokens calls
    only torch's kernels, which need no compilation. So later steps without adapters do not wait for compilations.
    """
    yield plans.plan(min(FIRST, plans.room))
    if device == "cuda":
        for tokens in LENGTHS:
            yield from plans.chunked(tokens, WAYS[0])
        for sampling in WAYS[1:]:
            yield from plans.chunked(FIRST, sampling)


class TrialRunner:
    """Runs trial steps on the serving runner, before the first request.

    disturbed  whether no step of some size was calm; set by `time` and `time_of`
    """

    def __init__(self, runner: Runner, plans: TrialPlans) -> None:
        self.runner = runner
        self.plans = plans
        self.disturbed = False

    @property
    def rows(self) -> int:
        return self.runner.instance.rows.scratch

    @property
    def device(self) -> str:
        """Kind of the runner's device: "cpu" or "cuda"."""
        return self.runner.instance.rows.device.type

    @property
    def generates(self) -> bool:
        """Whether tokens are sampled and scored."""
        return self.runner.instance.model.generates

    def warm_up(self) -> None:
        """Run the first steps, so that no request waits for initialization."""
        for plan in first_steps(self.plans, self.device):
            self.run(plan)

    def run(self, plan: StepPlan) -> float:
        """Compute a step and return its duration in seconds. Raises RequestFailed."""
        return run(self.runner, plan)

    def time(self, tokens: int, scored: int | None = None) -> float:
        """Return the shortest duration of up to TRIALS steps of `tokens` tokens: disturbances only lengthen a step.

        Short disturbances matter little to a step that lasts ENOUGH_S or longer, so it is run once, if it is calm.
        """
        return self.time_of(self.plans.plan(tokens, scored))

    def time_of(self, plan: StepPlan) -> float:
        """Return the shortest duration of up to TRIALS runs of a step, see `time`."""
        durations: list[float] = []
        calm = self.runner.overlaps  # a GPU computes without the thread
        while len(durations) < TRIALS and not (calm and sum(durations) >= ENOUGH_S):
            begun = time.thread_time()
            duration = self.run(plan)
            calm = calm or time.thread_time() - begun >= CALM * duration
            durations.append(duration)
        self.disturbed = self.disturbed or not calm
        return min(durations)


def run(runner: Runner, plan: StepPlan) -> float:
    """Compute a step and return its duration in seconds. Raises the fault of a failed row."""
    started = time.perf_counter()
    result = runner.read(runner.sample(runner.forward(plan)))
    for fault in result.failed.values():
        raise fault.error()
    return time.perf_counter() - started
