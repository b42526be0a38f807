"""Add drafts to the spans of decoding sequences: guessed tokens, which the same step verifies.

Plain decoding is speculation without drafts. Drafts take only what the step has to spare: token budget that no other
decoding sequence needs, and pages that no running sequence needs next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.scheduler.plan import Draft, Grant

if TYPE_CHECKING:
    from infd.scheduler.cache import Cache
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence


class Speculation:
    """Chooses the number of drafts, and counts how many were verified and kept.

    drafts    spans with drafts
    drafted   drafts that committed steps verified
    accepted  of these, drafts that were kept, by their place behind the last known token
    """

    def __init__(self, cache: Cache, most: int) -> None:
        """most: most drafts of a span."""
        self.drafts = 0
        self.drafted = 0
        self.accepted = [0] * most
        self._cache = cache
        self._most = most

    def width(self, decoding: int, budget: int) -> int:
        """Return the most drafts of each sequence in a step.

        decoding  number of sequences that decode in this step
        budget    tokens that the step may compute
        """
        return min(self._most, budget // decoding - 1) if decoding else 0

    def draft(self, plan: StepPlan, seq: Sequence, end: int, most: int) -> int:
        """Draft tokens behind a span that ends at `end` with the last planned token of `seq`; return their number.

        Tokens of steps in flight are unknown, so they are guessed too. The device ignores guesses of tokens that it
        has sampled by then.
        """
        most = min(most, seq.limit - end - 1, seq.regime_limit - end)
        if most <= 0:
            return 0
        tokens = seq.drafter.draft(seq.tokens, seq.in_flight + most)
        drafts = len(tokens) - seq.in_flight
        if drafts <= 0:
            return 0
        if end + drafts > seq.covered:
            drafts = self._cover(plan, seq, end, drafts)
        if drafts:
            assert seq.row is not None
            plan.drafts.append(Draft(seq.row, len(seq.tokens), tokens[: seq.in_flight + drafts]))
        return drafts

    def _cover(self, plan: StepPlan, seq: Sequence, end: int, drafts: int) -> int:
        """Take pages for drafts if pages are spare; return the number of drafts for which pages suffice."""
        if self._cache.shortage(seq, end + drafts) > self._cache.spare:
            return max(0, seq.covered - end)
        assert seq.row is not None
        plan.grants += [Grant(seq.row, *granted) for granted in self._cache.extend(seq, end + drafts)]
        return drafts

    def count(self, drafts: int, kept: int) -> None:
        """Count a committed span. kept: number of its drafts that were kept."""
        self.drafts += 1
        self.drafted += drafts
        for place in range(kept):
            self.accepted[place] += 1
