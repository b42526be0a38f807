"""Add drafts to the spans of decoding sequences: guessed tokens, which the same step verifies.

Plain decoding is speculation without drafts. Drafts take only what the step has to spare: token budget that no other
decoding sequence needs, and pages that no running sequence needs next. The drafts of all sequences are chosen together,
the likeliest first, as many as maximise the step's expected tokens per second. The share of a sequence's guesses that
came true is observed, even of guesses that no step verifies; the durations of steps are estimated by `StepCosts`.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

from infd.scheduler.plan import Draft, Grant
from infd.scheduler.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.scheduler.cache import Cache
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence

FIRST: Final = 0.5  # assumed agreement before any guess is observed
LEAST: Final = 1 / 64  # agreement below which a sequence gets no drafts, even in steps that would last no longer
RATE: Final = 1 / 8  # weight of one observed token in a sequence's agreement
COMMON_RATE: Final = 1 / 256  # weight of one observed token in the agreement with which sequences begin
WORTH: Final = 1.03  # gain in tokens per second from which on drafts are verified, if no drafts were before
RECONSIDERED: Final = 64  # steps after which it is decided anew whether any drafts could pay


class Speculation:
    """Chooses the drafts of each span, and counts how many were verified and kept.

    most      most drafts of a span; 0: nothing is ever drafted
    drafts    committed spans with drafts
    drafted   drafts that these spans verified
    accepted  of these, drafts that were kept, by their place behind the last known token
    """

    def __init__(self, cache: Cache, most: int, costs: Many[tuple[int, float]] = ()) -> None:
        """Set up.

        most   most drafts of a span
        costs  see StepCosts
        """
        self.most = most
        self.drafts = 0
        self.drafted = 0
        self.accepted = [0] * most
        self._cache = cache
        self._costs = StepCosts(costs)
        self._agreement = FIRST  # with which sequences begin
        self._chosen: dict[Sequence, int] = {}  # number of drafts of the step being planned, without those in flight
        self._drafting = False  # whether drafts paid the last time that there were guesses
        self._masked = False  # whether the last step waited for a mask
        self._hopeless: dict[int, bool] = {}  # by number of sequences: whether drafts do not pay, be they all right
        self._learned = 0  # steps since these were decided

    def choose(self, decoding: list[Sequence], budget: int) -> None:
        """Draft behind the planned tokens of each sequence of the step, and choose how many drafts are verified.

        Tokens of steps in flight are unknown, so they are guessed too. The device ignores guesses of tokens that it
        has sampled by then.

        decoding  the sequences that decode in this step
        budget    tokens that the step may compute
        """
        self._chosen.clear()
        count = len(decoding)
        room = min(budget - count, self.most * count)
        if room <= 0:
            return
        if self._is_hopeless(count):
            self._costs.forget(count + 1, (True, self._masked))
            return
        offers: list[tuple[float, Sequence]] = []
        for seq in decoding:
            unknown = seq.in_flight
            end = len(seq.tokens) + unknown
            most = min(self.most, seq.limit - end - 1, seq.regime_limit - end)
            self._observe(seq)
            guess = seq.drafter.draft(seq.tokens, unknown + max(most, 1))
            seq.drafts = guess
            if seq.drafter.sure:
                agreement, seq.guess = 1.0, (0, [])  # says nothing of other guesses
            else:
                agreement, seq.guess = seq.agreement, (len(seq.tokens), guess)
            if agreement < LEAST:
                continue
            chance = agreement ** (unknown + 1)
            for _ in range(min(len(guess) - unknown, most)):
                offers.append((chance, seq))
                chance *= agreement
        if offers:
            chosen = self._chosen
            for _, seq in self._worthwhile(count, offers, room):
                chosen[seq] = chosen.get(seq, 0) + 1

    def draft(self, plan: StepPlan, seq: Sequence, end: int, most: int) -> int:
        """Add the chosen drafts to a span that ends at `end` with the last planned token of `seq`; return their number.

        most  most drafts
        """
        drafts = min(self._chosen.get(seq, 0), most)
        if drafts > 0 and end + drafts > seq.covered:
            drafts = self._cover(plan, seq, end, drafts)
        if drafts <= 0:
            return 0
        assert seq.row is not None
        plan.drafts.append(Draft(seq.row, len(seq.tokens), seq.drafts[: seq.in_flight + drafts]))
        return drafts

    def took(self, plan: StepPlan, seconds: float, *, masked: bool) -> None:
        """Learn what a step costs, if it only decodes.

        masked  whether the step waited for a mask
        """
        self._masked = masked
        if all(span.count == span.samples for span in plan.spans):
            self._costs.learn(plan.tokens, (bool(plan.drafts), masked), seconds)
            self._learned += 1
            if self._learned == RECONSIDERED:
                self._learned = 0
                self._hopeless.clear()

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

    def _worthwhile(self, count: int, offers: list[tuple[float, Sequence]], room: int) -> Many[tuple[float, Sequence]]:
        """Return the offered drafts with which a step has the most expected tokens per second.

        count   number of sequences in the step
        offers  for each draft, the chance that it is kept, and its sequence
        room    most drafts of the step
        """
        costs, kind, expected = self._costs, (True, self._masked), float(count)
        most, best = expected / costs.of(count, (False, self._masked)) * (1.0 if self._drafting else WORTH), 0
        offers.sort(key=itemgetter(0), reverse=True)  # a sequence's first drafts stay before its others
        for drafts, (chance, _) in enumerate(offers[:room], 1):
            expected += chance
            rate = expected / costs.of(count + drafts, kind)
            if rate > most:
                best, most = drafts, rate
        self._drafting = best > 0
        if not best:
            costs.forget(count + 1, kind)
        return offers[:best]

    def _is_hopeless(self, count: int) -> bool:
        """Return whether drafts of `count` sequences do not pay, even if all are right: then none are guessed."""
        if (hopeless := self._hopeless.get(count)) is None:
            costs, kind = self._costs, (True, self._masked)
            plain = count / costs.of(count, (False, self._masked))
            rates = ((count + drafts) / costs.of(count + drafts, kind) for drafts in range(1, self.most * count + 1))
            hopeless = self._hopeless[count] = not any(rate > plain for rate in rates)
        return hopeless
