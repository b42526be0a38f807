"""Measure at start the number of tokens that a step computes within its target time, and the cost of scoring a token.

Long prompts are computed in chunks of `step_tokens` tokens. A step's duration is the pause of other streams, and the
time that a new request waits for the scheduler; `step_tokens` bounds both.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct

from infd.runner.start.trial import FIRST, TRIALS, WAYS

if TYPE_CHECKING:
    from infd.config import SchedulerConfig
    from infd.runner.start.trial import TrialRunner

LEAST = 64  # least step_tokens
MOST = {"cpu": 2048, "cuda": 8192}  # most step_tokens, by kind of device
GROWTH = 4  # factor between the token counts of successive measured steps
FEW = 16  # a step of this many tokens lasts about as long as a step of one token
TARGET_MS = {"cpu": 150.0, "cuda": 50.0}
# The target time of mixed steps is the longer of: CALM_MS, and PACE times the duration of the shortest step.
CALM_MS = 50.0
PACE = 1.75
EVEN = 8  # budgets of mixed steps are multiples of EVEN, because kernels multiply rows in tiles
WAITS = 31  # steps of which the median is taken, to compare polling with sleeping
SHORT_S = 2e-3  # longer steps are not polled: the latency of the interrupt is a small share of their duration
SPIN_STEPS = 1.5  # time limit of polling, in durations of the step
WORTH = 0.97  # polling is used if a polled step lasts at most this share of an unpolled step
# Scored tokens of a measured step. With FEW, kernel launches would dominate a step's duration on a GPU.
SCORED = {"cpu": FEW, "cuda": 1024}
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # rows of the measured decoding steps
LIKELIEST = 20  # top logprobs per scored token in measured steps
ALIKE = 1.25  # a calibration is valid while the shortest step's duration changes at most by this factor


class StepTokens(NamedTuple):
    """Token budgets of a step.

    alone    of a step in which no sequence decodes
    mixed    of a step in which a sequence decodes
    crowded  of a step in which a sequence decodes, while many prompts wait
    """

    alone: int
    mixed: int
    crowded: int


class Calibration(Struct, frozen=True):
    """The measurements of steps at start. alone, mixed, crowded: see StepTokens.

    shortest_s  duration of the shortest step, see `shortest_s`
    score_cost  cost of a scored token, in unscored tokens
    row_costs   see Capacity.row_costs
    disturbed   whether other processes used the cores meanwhile, see `TrialRunner.disturbed`
    """

    shortest_s: Annotated[float, Meta(gt=0)]
    alone: Annotated[int, Meta(ge=1)]
    mixed: Annotated[int, Meta(ge=1)]
    crowded: Annotated[int, Meta(ge=1)]
    score_cost: Annotated[int, Meta(ge=1)]
    row_costs: tuple[tuple[int, float], ...] = ()
    disturbed: bool = False

    @property
    def step_tokens(self) -> StepTokens:
        return StepTokens(self.alone, self.mixed, self.crowded)


def shortest_s(trial: TrialRunner) -> float:
    """Return the duration of a step of FEW tokens, which lasts about as long as a step of one token."""
    return trial.time(min(FEW, trial.plans.room))


def choose_spin(trial: TrialRunner) -> float:
    """Make the host poll for the end of a step before it sleeps, if steps are short and polling makes them faster.

    Returns the time limit of polling in seconds; 0: the host does not poll.
    """
    runner, chunks = trial.runner, trial.plans.chunked(FIRST, WAYS[0])
    if not chunks or not runner.overlaps:
        return 0.0
    runner.prepare_to_wait()
    for plan in chunks:
        trial.run(plan)

    def median() -> float:
        return sorted(trial.run(chunks[-1]) for _ in range(WAITS))[WAITS // 2]

    slept, spin = median(), 0.0
    if slept <= SHORT_S:
        runner.spin(spin := SPIN_STEPS * slept)
        if median() > WORTH * slept:
            runner.spin(spin := 0.0)
    return spin


def calibrate(trial: TrialRunner, settings: SchedulerConfig, most: int) -> Calibration:
    """Measure the shortest step, the token budgets and the cost of scoring.

    most  tokens of the largest allowed step
    """
    trial.disturbed = False
    shortest = shortest_s(trial)
    sizes, configured = StepTokens(most, most, most), settings.step_tokens
    if configured is None or configured > LEAST:
        sizes = measure(trial, settings.step_target_ms, shortest=shortest, most=most)
        if configured is not None:
            sizes = StepTokens(most, min(most, sizes.mixed), min(most, sizes.crowded))
    cost = score_cost(trial, shortest) if trial.generates else 1
    speculative = trial.generates and settings.speculative != "off"
    costs = row_costs(trial) if speculative else ()
    return Calibration(shortest, *sizes, cost, costs, trial.disturbed)


def still_valid(calibration: Calibration, trial: TrialRunner) -> bool:
    """Return whether the shortest step's duration differs from the calibration's at most by the factor ALIKE.

    If it is longer, the machine is slower or busy; if it is shorter, the machine was busy during the calibration.
    """
    for _ in range(TRIALS):
        ratio = trial.run(trial.plans.plan(min(FEW, trial.plans.room))) / calibration.shortest_s
        if ratio <= ALIKE:
            return ratio >= 1 / ALIKE
    return False


def measure(trial: TrialRunner, target_ms: float | None, *, shortest: float, most: int) -> StepTokens:
    """Return the token budgets whose steps last at most the target time.

    shortest   see `shortest_s`
    target_ms  the target time; None: TARGET_MS, but for mixed steps see CALM_MS
    most       tokens of the largest allowed step

    `alone` is a power of two, at most `most`. But it is at least LEAST, and at least twice the number of rows, so that
    a step can compute prompts while all rows decode.
    """
    least, room = max(LEAST, _power_of_two(4 * trial.rows - 1)), trial.plans.room
    durations = {min(FEW, room): shortest}
    tokens = min(LEAST, room)
    durations[tokens] = trial.time(tokens)
    target_s = (target_ms or TARGET_MS[trial.device]) / 1000
    while durations[tokens] * GROWTH < target_s and tokens * GROWTH <= min(room, most):
        tokens *= GROWTH
        durations[tokens] = trial.time(tokens)
    mixed_s = target_ms / 1000 if target_ms else max(CALM_MS / 1000, PACE * shortest)
    targets = mixed_s, max(mixed_s, target_s)
    mixed, crowded = (max(FEW, _within(seconds, durations) // EVEN * EVEN) for seconds in targets)
    alone = max(least, min(_power_of_two(most), _power_of_two(_within(target_s, durations))))
    return StepTokens(alone, min(alone, mixed), min(alone, crowded))


def _within(seconds: float, durations: dict[int, float]) -> int:
    """Interpolate the number of tokens that a step computes in `seconds`; beyond the measured durations, extrapolate.

    durations  seconds by number of tokens, ascending
    """
    for (few, short), (many, long) in pairwise(durations.items()):
        if short < seconds < long:
            return int(few + (many - few) * (seconds - short) / (long - short))
    tokens, longest = list(durations.items())[-1 if seconds >= max(durations.values()) else 0]
    return int(tokens * seconds / longest)


def score_cost(trial: TrialRunner, shortest: float) -> int:
    """Return the cost of a scored token, in unscored tokens: for a scored token, logits are computed and sorted.

    shortest  see `shortest_s`
    """
    tokens = min(SCORED[trial.device], trial.plans.room)
    unscored = shortest if tokens <= FEW else trial.time(tokens)
    return max(1, round(trial.time(tokens, LIKELIEST) / unscored))


def row_costs(trial: TrialRunner) -> tuple[tuple[int, float], ...]:
    """Return the duration in seconds of decoding steps of ROWS rows, all of which are sampled.

    Steps of fewer rows are assumed to take no longer: a longer measured duration is a disturbance.
    """
    measured = [(rows, trial.time_of(trial.plans.verifying(rows))) for rows in ROWS if rows <= trial.plans.room]
    shortest = accumulate((seconds for _, seconds in reversed(measured)), min)
    return tuple(reversed([(rows, seconds) for (rows, _), seconds in zip(reversed(measured), shortest, strict=True)]))


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
