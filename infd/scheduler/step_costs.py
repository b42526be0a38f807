"""Estimate the duration of decoding steps: measured at start by number of rows, corrected by the steps that follow.

Steps that verify drafts, and steps that wait for masks, cost the host work that steps at start do not. Contexts are
longer than at start, and other programs use the processor. So each kind of step has its own correction, which every
committed step of the kind adjusts.

A step that is issued only once the step before is committed begins late, because the device waits for the host. By how
much is learned where both are seen: steps that begin late, and steps that were issued ahead.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log, log1p
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

SPEED_RATE: Final = 1 / 16  # share of a step's deviation that is taken for a change of the machine's speed
RATE: Final = 1 / 16  # share that corrects the steps of the same kind; again, those of about as many rows
CLIP: Final = 0.4  # largest deviation that counts, as a logarithm: a longer pause has other causes than the step's kind
FORGOTTEN: Final = 1 / 256  # of the correction of steps with drafts, by each step for which drafts are too expensive

FIRST_LATE_S: Final = 0.3e-3  # seconds by which a step begins late, assumed until steps of both sorts are seen
LEAST_LATE_S: Final = 0.2e-3  # a smaller mean is an error: durations scatter by more
FIRST_LATE_STEPS: Final = 16  # late steps that the assumption outweighs
LATE_STEPS: Final = 64  # late steps over which the mean is taken
RECENT: Final = 64  # steps after one that was issued ahead in which late steps are compared with it

Kind = tuple[bool, bool]  # whether the step verifies drafts, and whether it waits for a mask


class StepCosts:
    """The duration of a decoding step by its kind and its number of rows.

    late_s  seconds by which a step begins late that is issued only once the step before is committed
    """

    def __init__(self, measured: Many[tuple[int, float]]) -> None:
        """measured: pairs of rows and seconds, by ascending rows; empty: all steps take equally long, and ever will."""
        self._measured = tuple(measured)
        self._by_rows: dict[int, float] = {}  # logarithms of the durations at start
        self._speed = 0.0  # logarithm of the duration of all steps now over that at start
        # Logarithms of factors: for all steps of a kind (size 0), and for those of a size. Both apply to a step.
        self._corrections: dict[tuple[Kind, int], float] = {}
        self.late_s = FIRST_LATE_S
        self._late_steps = FIRST_LATE_STEPS
        self._recent = 0  # steps in which late steps are still compared with one that was issued ahead

    def of(self, rows: int, kind: Kind = (False, False)) -> float:
        """Return a step's duration in seconds, at the machine's speed at start."""
        return exp(self.log(rows, kind))

    def log(self, rows: int, kind: Kind = (False, False), *, late: bool = False) -> float:
        """Return the logarithm of a step's duration. late: whether it begins late."""
        if (found := self._by_rows.get(rows)) is None:
            found = self._by_rows[rows] = log(self._at_start(rows))
        found += self._correction(kind, 0) + self._correction(kind, _size(rows))
        return found + log1p(self.late_s * exp(-found - self._speed)) if late else found

    def learn(self, rows: int, kind: Kind, seconds: float, *, late: bool = False) -> float:
        """Correct the estimates by the duration of a step; return the deviation as a logarithm, CLIP at most.

        late  whether the step began late. Without drafts only `late_s` is corrected, and 0 returned
        """
        if not self._measured or seconds <= 0:
            return 0.0
        if not late:
            self._recent = RECENT
        elif self._recent and not kind[0]:  # the lateness of steps with drafts is not told from their other costs
            self._recent -= 1
            self._learn_late(exp(self.log(rows, kind) + self._speed), seconds)
            return 0.0
        else:
            seconds = max(seconds / 2, seconds - self.late_s)
        deviation = log(seconds) - self.log(rows, kind) - self._speed
        deviation = max(-CLIP, min(CLIP, deviation))
        self._speed += SPEED_RATE * deviation
        for size in (0, _size(rows)):
            self._corrections[kind, size] = self._correction(kind, size) + RATE * deviation
        return deviation

    def _learn_late(self, expected: float, seconds: float) -> None:
        """Learn by how much a step began late that took `seconds`, and `expected` seconds had it been issued ahead."""
        self._late_steps = min(LATE_STEPS, self._late_steps + 1)
        more = max(-CLIP * expected, min(CLIP * expected, seconds - expected))
        self.late_s = max(LEAST_LATE_S, self.late_s + (more - self.late_s) / self._late_steps)

    def forget(self, rows: int, kind: Kind) -> None:
        """Let the corrections of a kind approach those of steps without drafts, because no step of the kind is tried.

        Otherwise estimates that are too high, because other programs delayed a few steps, would stay so.
        """
        for size in (0, _size(rows)):
            if (correction := self._corrections.get((kind, size))) is not None:
                plain = self._corrections.get(((False, kind[1]), size), 0.0)
                self._corrections[kind, size] = correction + FORGOTTEN * (plain - correction)

    def _correction(self, kind: Kind, size: int) -> float:
        """Return a correction. Before a step with drafts was seen, it is that of steps without drafts."""
        found = self._corrections.get((kind, size))
        if found is None and kind[0]:
            found = self._corrections.get(((False, kind[1]), size))
        return found or 0.0

    def _at_start(self, rows: int) -> float:
        """Interpolate the measured duration in seconds; beyond the measured numbers of rows, extrapolate."""
        measured = self._measured
        if len(measured) < 2:
            return measured[0][1] if measured else 1.0
        segments = [*pairwise(measured)]
        (few, short), (many, long) = next((each for each in segments if rows <= each[1][0]), segments[-1])
        return max(short, short + (long - short) * (rows - few) / (many - few))


def _size(rows: int) -> int:
    """Return a number that steps of about as many rows share: two for each doubling."""
    bits = rows.bit_length()
    return 2 * bits + (rows >> max(0, bits - 2) & 1)
