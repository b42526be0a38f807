"""Measure, at start, how many tokens a step can compute within its target time, and what it costs to score them.

The steps measured are ordinary plans, on rows and pages that nobody holds yet;
they are invisible outside the runner. Long prompts are computed in steps of
such a size, so it bounds how long a stream may pause, and how long whoever
comes next waits to be looked at.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct

from infd.request import Generate, SamplingParams, Score
from infd.rounding import ceil_div
from infd.scheduler.plan import Join, Span, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.config import SchedulerConfig
    from infd.request import Want
    from infd.runner.runner import Runner
    from infd.scheduler.layout import CacheLayout

LEAST = 64
MOST = {"cpu": 2048, "cuda": 8192}
FIRST = 4  # tokens of the first step, which pays for whatever is set up on first use
LENGTHS = (1537, 200)  # tokens of a sequence that is long enough to be treated as one, and of one that is not
WAYS = (  # to choose a token
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9),
    SamplingParams(
        max_tokens=1, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, allowed_token_ids=(0,)
    ),
)
GROWTH = 4
TRIALS = 5  # of each size, as long as they are short
ENOUGH_S = 0.05
FEW = 16  # tokens of a step that is hardly longer than the shortest
TARGET_MS = {"cpu": 150.0, "cuda": 50.0}
CALM_MS = 50.0  # what a step may take that streams wait for,
PACE = 1.75  # or this many times the shortest one, where that is more
EVEN = 8  # mixed steps are a multiple of: products take rows in groups
WAITS = 31  # for steps, of which the middle one counts
SHORT_S = 2e-3  # of a longer step, being told late is a small share
ASKED = 1.5  # of a step: how long its end is asked for
WORTH = 0.97  # of what a step took: a smaller gain is none
SCORED = {"cpu": FEW, "cuda": 1024}  # where few tokens take as long as it takes to launch their kernels, many tell more
LIKELIEST = 20  # tokens asked for where scoring is measured
ALIKE = 1.25  # times as long or as short: what a measured step may take later on


class Sizes(NamedTuple):
    """Tokens of a step of prompts alone, of one that streams wait for, and of one that many prompts wait for, too."""

    alone: int
    mixed: int
    crowded: int


class Calibration(Struct, frozen=True):
    """What is measured of steps.

    shortest_s  seconds of the shortest step
    score_cost  as how many tokens a scored one counts
    """

    shortest_s: Annotated[float, Meta(gt=0)]
    alone: Annotated[int, Meta(ge=1)]
    mixed: Annotated[int, Meta(ge=1)]
    crowded: Annotated[int, Meta(ge=1)]
    score_cost: Annotated[int, Meta(ge=1)]

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.alone, self.mixed, self.crowded)


class Trial:
    """Plans of any size for a runner that serves nobody yet."""

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

    def parts(self, tokens: int, sampling: SamplingParams) -> list[StepPlan]:
        """Return three steps that compute one prompt: most of it, some more, its last token.

        tokens  as many as there is room for, at most these; too few to cut: no steps
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
        """Return how many tokens of one sequence fit where behind a window pages must be let go to hold all."""
        return self._pages // len(self._groups) * min(group.page_tokens for group in self._groups)


def first_steps(trial: Trial, device: str) -> Iterator[StepPlan]:
    """Plan the steps that set up whatever is set up on first use: the smallest one, and on a GPU some more.

    There, kernels are compiled when they are first called for. Few long sequences call for others than short ones, and
    each way of choosing tokens for its own. Between them these steps call for all; no later step calls for another.
    """
    yield trial.plan(min(FIRST, trial.room))
    if device == "cuda":
        for tokens in LENGTHS:
            yield from trial.parts(tokens, WAYS[0])
        for sampling in WAYS[1:]:
            yield from trial.parts(FIRST, sampling)


def warm_up(runner: Runner, trial: Trial, device: str) -> None:
    """Run the first steps, so that no stream waits for what they set up."""
    for plan in first_steps(trial, device):
        run(runner, plan)


def shortest_s(runner: Runner, trial: Trial) -> float:
    """Return the seconds that a step of FEW tokens takes, which is hardly longer than one of a single token."""
    return _time(runner, trial, min(FEW, trial.room))


def choose_spin(runner: Runner, trial: Trial) -> float:
    """Have waits ask for the end of short steps before they sleep, where a sequence decodes faster so.

    Returns for how many seconds they ask; 0 where the device interrupts early enough, or steps are long.
    """
    plans = trial.parts(FIRST, WAYS[0])
    if not plans or not runner.overlaps:
        return 0.0
    runner.attend()
    for plan in plans:
        run(runner, plan)

    def usual() -> float:
        return sorted(run(runner, plans[-1]) for _ in range(WAITS))[WAITS // 2]

    slept, spin = usual(), 0.0
    if slept <= SHORT_S:
        runner.spin(spin := ASKED * slept)
        if usual() > WORTH * slept:
            runner.spin(spin := 0.0)
    return spin


def calibrate(
    runner: Runner, trial: Trial, settings: SchedulerConfig, device: str, *, rows: int, most: int, scores: bool
) -> Calibration:
    """Measure all of it.

    most    tokens of the largest step that there may be
    scores  whether prompts are scored
    """
    shortest = shortest_s(runner, trial)
    sizes, told = Sizes(most, most, most), settings.step_tokens
    if told is None or told > LEAST:
        sizes = measure(runner, trial, settings.step_target_ms, device, shortest=shortest, rows=rows, most=most)
        if told is not None:
            sizes = Sizes(most, min(most, sizes.mixed), min(most, sizes.crowded))
    cost = score_cost(runner, trial, shortest, device) if scores else 1
    return Calibration(shortest, *sizes, cost)


def holds(calibration: Calibration, runner: Runner, trial: Trial) -> bool:
    """Say whether the shortest step takes as long as it did when this was measured.

    If it takes longer, the machine is slower or busy; if it is over sooner, it was busy then.
    """
    for _ in range(TRIALS):
        times = run(runner, trial.plan(min(FEW, trial.room))) / calibration.shortest_s
        if times <= ALIKE:
            return times >= 1 / ALIKE
    return False


def measure(
    runner: Runner, trial: Trial, target_ms: float | None, device: str, *, shortest: float, rows: int, most: int
) -> Sizes:
    """Return how large steps are that take at most so long.

    shortest   see `shortest_s`
    target_ms  None: TARGET_MS where no stream waits; beside streams CALM_MS, or PACE times the shortest step, for
               which they would wait anyway

    The first size is a power of two, at most `most`, and never so small that `rows` decoding sequences would leave no
    room for prompts.
    """
    least = max(LEAST, _power_of_two(4 * rows - 1))
    taken = {min(FEW, trial.room): shortest}
    tokens = min(LEAST, trial.room)
    taken[tokens] = _time(runner, trial, tokens)
    target_s = (target_ms or TARGET_MS[device]) / 1000
    while taken[tokens] * GROWTH < target_s and tokens * GROWTH <= min(trial.room, most):
        tokens *= GROWTH
        taken[tokens] = _time(runner, trial, tokens)
    mixed_s = target_ms / 1000 if target_ms else max(CALM_MS / 1000, PACE * shortest)
    mixed, crowded = (max(FEW, _within(seconds, taken) // EVEN * EVEN) for seconds in (mixed_s, max(mixed_s, target_s)))
    alone = max(least, min(_power_of_two(most), _power_of_two(_within(target_s, taken))))
    return Sizes(alone, min(alone, mixed), min(alone, crowded))


def _within(seconds: float, taken: dict[int, float]) -> int:
    """Return how many tokens take so long, where some, from few to many, have `taken` that many seconds."""
    for (few, short), (many, long) in pairwise(taken.items()):
        if short < seconds < long:
            return int(few + (many - few) * (seconds - short) / (long - short))
    tokens, longest = list(taken.items())[-1 if seconds >= max(taken.values()) else 0]
    return int(tokens * seconds / longest)


def score_cost(runner: Runner, trial: Trial, shortest: float, device: str) -> int:
    """Return as how many tokens of a step one counts that is scored: its logits take time as well, and more sorting.

    shortest  see `shortest_s`
    """
    tokens = min(SCORED[device], trial.room)
    unscored = shortest if tokens <= FEW else _time(runner, trial, tokens)
    return max(1, round(_time(runner, trial, tokens, LIKELIEST) / unscored))


def _time(runner: Runner, trial: Trial, tokens: int, scored: int | None = None) -> float:
    """Return the seconds that such a step takes: the best of some, since whatever disturbs one makes it longer.

    What disturbs is short, and the start waits: of a step that takes long one trial is enough.
    """
    taken: list[float] = []
    while len(taken) < TRIALS and sum(taken) < ENOUGH_S:
        taken.append(run(runner, trial.plan(tokens, scored)))
    return min(taken)


def run(runner: Runner, plan: StepPlan) -> float:
    """Compute a step and return the seconds it took. Its result must be sound, or the model is broken."""
    started = time.perf_counter()
    result = runner.read(runner.sample(runner.forward(plan)))
    for fault in result.failed.values():
        raise fault.error()
    return time.perf_counter() - started


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
