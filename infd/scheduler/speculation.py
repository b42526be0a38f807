"""Add drafts to the spans of decoding sequences: guessed tokens, which the same step verifies.

Plain decoding is speculation without drafts. Drafts take only what the step has to spare: token budget that no other
decoding sequence needs, and pages that no running sequence needs next. A sequence gets as many drafts as maximise its
expected tokens per second: the share of its guesses that came true is observed, even of guesses that no step verifies,
and the duration of steps by number of rows is measured at start.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from infd.scheduler.plan import Draft, Grant

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.scheduler.cache import Cache
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence

FIRST: Final = 0.5  # assumed agreement before any guess is observed
RATE: Final = 1 / 8  # weight of one observed token in a sequence's agreement
COMMON_RATE: Final = 1 / 256  # weight of one observed token in the agreement with which sequences begin
LEVELS: Final = 32  # of agreement that are distinguished
WORTH: Final = 1.03  # gain in tokens per second from which on a sequence without drafts gets drafts


class StepCosts:
    """The duration of a decoding step by its number of rows."""

    def __init__(self, measured: Many[tuple[int, float]]) -> None:
        """measured: pairs of rows and seconds, by ascending rows; empty: all steps take equally long."""
        self._measured = tuple(measured)

    def of(self, rows: int) -> float:
        """Interpolate the duration in seconds; beyond the measured numbers of rows, extrapolate."""
        measured = self._measured
        if len(measured) < 2:
            return measured[0][1] if measured else 1.0
        segments = [*pairwise(measured)]
        (few, short), (many, long) = next((each for each in segments if rows <= each[1][0]), segments[-1])
        return max(short, short + (long - short) * (rows - few) / (many - few))


class Speculation:
    """Chooses the number of drafts of each span, and counts how many were verified and kept.

    drafts    committed spans with drafts
    drafted   drafts that these spans verified
    accepted  of these, drafts that were kept, by their place behind the last known token
    """

    def __init__(self, cache: Cache, most: int, costs: Many[tuple[int, float]] = ()) -> None:
        """Set up.

        most   most drafts of a span
        costs  see StepCosts
        """
        self.drafts = 0
        self.drafted = 0
        self.accepted = [0] * most
        self._cache = cache
        self._most = most
        self._costs = StepCosts(costs)
        self._agreement = FIRST  # with which sequences begin
        self._chosen: dict[tuple[int, int, bool], int] = {}  # see `best`

    def room(self, decoding: int, budget: int) -> int:
        """Return the most drafts of each sequence in a step.

        decoding  number of sequences that decode in this step
        budget    tokens that the step may compute
        """
        if not self._most or not decoding:
            return 0
        return max(0, min(self.best(decoding, LEVELS, drafting=True), budget // decoding - 1))

    def draft(self, plan: StepPlan, seq: Sequence, end: int, most: int, decoding: int) -> int:
        """Draft tokens behind a span that ends at `end` with the last planned token of `seq`; return their number.

        Tokens of steps in flight are unknown, so they are guessed too. The device ignores guesses of tokens that it
        has sampled by then.

        decoding  number of sequences that decode in this step
        """
        self._observe(seq)
        most = min(most, seq.limit - end - 1, seq.regime_limit - end)
        guess = seq.drafter.draft(seq.tokens, seq.in_flight + max(most, 1))
        if seq.drafter.sure:
            most = min(most, self.best(decoding, LEVELS, drafting=True))
            seq.guess = 0, []  # says nothing of other guesses
        else:
            most = min(most, self.best(decoding, round(LEVELS * seq.agreement), drafting=seq.drafting))
            seq.drafting = most > 0
            guess = guess[: seq.in_flight + max(most, 1)]
            seq.guess = len(seq.tokens), guess
        drafts = min(len(guess) - seq.in_flight, most)
        if drafts > 0 and end + drafts > seq.covered:
            drafts = self._cover(plan, seq, end, drafts)
        if drafts <= 0:
            return 0
        assert seq.row is not None
        plan.drafts.append(Draft(seq.row, len(seq.tokens), guess[: seq.in_flight + drafts]))
        return drafts

    def count(self, seq: Sequence, drafts: int, kept: int) -> None:
        """Count a committed span. kept: number of its drafts that were kept."""
        self.drafts += 1
        self.drafted += drafts
        seq.drafted += drafts
        seq.kept_drafts += kept
        for place in range(kept):
            self.accepted[place] += 1

    def _cover(self, plan: StepPlan, seq: Sequence, end: int, drafts: int) -> int:
        """Take pages for drafts if pages are spare; return the number of drafts for which pages suffice."""
        if self._cache.shortage(seq, end + drafts) > self._cache.spare:
            return max(0, seq.covered - end)
        assert seq.row is not None
        plan.grants += [Grant(seq.row, *granted) for granted in self._cache.extend(seq, end + drafts)]
        return drafts

    def _observe(self, seq: Sequence) -> None:
        """Compare a sequence's last guess with the tokens that followed, up to the first that differs."""
        start, guess = seq.guess
        if seq.agreement < 0:
            seq.agreement = self._agreement
        for guessed, token in zip(guess, seq.tokens[start : start + len(guess)], strict=False):
            agrees = guessed == token
            seq.agreement += RATE * (agrees - seq.agreement)
            self._agreement += COMMON_RATE * (agrees - self._agreement)
            if not agrees:
                return

    def best(self, decoding: int, level: int, *, drafting: bool) -> int:
        """Return the number of drafts with the most expected tokens per second.

        level     agreement, in LEVELS
        drafting  whether the sequence's last span had drafts; otherwise drafts must gain WORTH
        """
        key = decoding, level, drafting
        if (best := self._chosen.get(key)) is None:
            agreement, expected = level / LEVELS, 1.0
            most = (1.0 if drafting else WORTH) / self._costs.of(decoding)
            best = 0
            for drafts in range(1, self._most + 1):
                expected += agreement**drafts
                rate = expected / self._costs.of(decoding * (drafts + 1))
                if rate > most:
                    best, most = drafts, rate
            self._chosen[key] = best
        return best
