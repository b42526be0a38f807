"""Add drafts to the spans of decoding sequences: guessed tokens, which the same step verifies.

Plain decoding is speculation without drafts. Drafts take only what the step has to spare: token budget that no other
decoding sequence needs, and pages that no running sequence needs next.

The drafts of all sequences are chosen together, because all wait for the step. They maximise the sum of the logarithms
of the sequences' expected speeds, in tokens per second. So a sequence with many likely drafts slows the others down
only a little, and sequences that began together end together: a sequence left over would decode alone, at a higher
cost per token. The share of guesses that came true is observed, even of guesses that no step verifies; the durations of
steps are estimated by `StepCosts`.

Drafts follow known tokens. So a step with drafts is planned once the step before is committed, while the device has
nothing to do, if `Executor.depth` is 1. Where drafts gain less than the next step issued ahead, that step is issued
ahead, without drafts.

To seek drafts costs processor time, which on a CPU the steps lack. So for many sequences at once drafts are sought
while a credit lasts, from which each search is paid. Its income is what verified drafts gain, and a small share of all
time.
"""

from __future__ import annotations

import logging
from math import log
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from infd.drafting.drafter import NO_DRAFTS, RUN
from infd.scheduler.plan import Draft, Grant
from infd.scheduler.step_costs import StepCosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Many

    from infd.scheduler.cache import Cache
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence

_LOG: Final = logging.getLogger("infd.scheduler")

FIRST: Final = 0.5  # assumed agreement before any guess is observed
FIRST_LIKELY: Final = 0.8  # of drafts that a grammar allows, see drafter.LIKELY
LEAST: Final = 1 / 64  # drafts behind a first draft that is less likely are verified in no step
CLASSES: Final = 9  # of drafts, by the length of the run that they follow: their agreement is observed apart
_CLASS: Final = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6)  # by length; 7: of longer runs; 8: LIKELY
# For each Drafter.run, the class of each draft of a guess: each draft that agrees makes the run behind it longer.
CLASS: Final = [
    [0] * 64,
    *([_CLASS[at] if at < 12 else 7 for at in range(run, run + 64)] for run in range(1, RUN + 1)),
    [8] * 64,
]
RATE: Final = 1 / 8  # weight of one observed token in a sequence's agreement
COMMON_RATE: Final = 1 / 64  # weight of one observed token in the agreement with which sequences begin
WORTH: Final = log(1.1)  # mean gain in speed from which on drafts are verified, if no drafts were before
TIE: Final = 1e-9  # smaller differences are errors of rounding: of equally good numbers of drafts the least is taken
MEASURED: Final = 64  # drafts of a step up to which each number is tried
MANY: Final = 4  # sequences of a step from which on guesses are skipped: the step lacks the time that each takes
MISSES: Final = 4  # guesses in a row that failed, or were none, for each step without a guess that follows
MOST_SKIPPED: Final = 3  # steps: an answer that begins to repeat itself soon has drafts
RECONSIDERED: Final = 64  # steps after which it is decided anew whether any drafts could pay
SEEKING_S: Final = 25e-6  # seconds to seek the drafts of a sequence, in caches that a step has filled with weights
SPARE: Final = 1 / 2048  # share of the time in which drafts are sought even if none ever gain
CREDIT: Final = 2.0  # most credit, and the first: 80 steps of 8 ms in which drafts of eight sequences are sought
DEBT: Final = 64 * SPARE  # most debt, so that drafts are sought at least in every 64th step
LEARNED: Final = 8  # steps of which one teaches what steps cost, while no drafts are sought
GAIN_RATE: Final = 1 / 16  # weight of one step in the mean gain of drafts
FIRST_HOPE: Final = 0.1  # weight of the assumption that hopes come true, see Speculation.awaits
FORGOTTEN: Final = 1 / 1024  # of disappointed hopes, by each step that is issued ahead
DELAYED: Final = 0.6  # share of the gain of drafts that is lost if they begin one token later


class Speculation:
    """Chooses the drafts of each span, and counts how many were verified and kept.

    most      most drafts of a span; 0: nothing is ever drafted
    drafts    committed spans with drafts
    drafted   drafts that these spans verified
    accepted  of these, drafts that were kept, by their place behind the last known token
    chosen    number of drafts of the step being planned, without those in flight; sequences without drafts are left out
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
        self.chosen: dict[Sequence, int] = {}
        self._costs = StepCosts(costs)
        self._agreement = [FIRST] * (CLASSES - 1) + [FIRST_LIKELY]  # with which sequences begin
        self._drafting = False  # whether drafts paid the last time that there were guesses
        self._considered = False  # whether drafts behind the tokens known now were considered
        self._gain = 0.0  # of these: logarithm of the speed with them over that without, mean of the step's sequences
        self._mean_gain = 0.0  # of the latest steps
        self._hoped = 0.0  # the gain for which the step being planned has waited
        self._hopes = self._found = FIRST_HOPE  # means of such gains, and of those that steps then found
        self._late = False  # whether steps with drafts begin late, because others may be issued ahead
        self._credit = CREDIT  # for seeking drafts, in durations of a step
        self._sought = 0  # searches since they were last paid for, one for each sequence
        self._kept = 0  # drafts kept since then
        self._masked = False  # whether the last step waited for a mask
        self._hopeless: dict[int, bool] = {}  # by number of sequences: whether drafts do not pay, be they all right
        self._alone: dict[int, bool] = {}  # by number of sequences: see `pays_alone`
        self._learned = 0  # steps since these were decided

    def choose(self, decoding: list[Sequence], budget: int) -> None:
        """Draft behind the planned tokens of each sequence of the step, and choose how many drafts are verified.

        Tokens of steps in flight are unknown, so they are guessed too. The device ignores guesses of tokens that it
        has sampled by then.

        decoding  the sequences that decode in this step
        budget    tokens that the step may compute
        """
        self.chosen.clear()
        hoped, self._hoped = self._hoped, 0.0
        count = len(decoding)
        room = min(budget - count, self.most * count)
        if room <= 0 or self._rests(count):
            return
        chosen = self.chosen
        for _, seq in self._consider(decoding, room):
            chosen[seq] = chosen.get(seq, 0) + 1
        if hoped:
            self._hopes += GAIN_RATE * (hoped - self._hopes)
            self._found += GAIN_RATE * (self._gain - self._found)

    def awaits(self, decoding: list[Sequence]) -> bool:
        """Return whether the next step should wait for the tokens in flight, because drafts may pay behind them.

        Otherwise it is issued ahead, without drafts. Drafts that would pay behind the tokens known now probably go on
        behind those in flight; others may begin there, as often as they did. Both are hopes: counted is the share of
        such gains that steps found which waited for them.

        decoding  all running sequences
        """
        self._late = True
        if self._rests(len(decoding)):
            return False
        if not self._considered:
            self._consider(decoding, self.most * len(decoding), known=True)
        kind, count = (False, self._masked), len(decoding)
        saved = self._costs.log(count, kind, late=True) - self._costs.log(count, kind)
        hoped = max(self._gain, DELAYED * self._mean_gain)
        if hoped * self._found > saved * self._hopes:
            self._hoped = hoped
            return True
        self._found += FORGOTTEN * (self._hopes - self._found)
        self._gain = 0.0  # the drafts are not verified
        return False

    def committed(self) -> None:
        """Called when a step is committed: more tokens are known."""
        self._considered = False

    def _consider(self, decoding: list[Sequence], room: int, *, known: bool = False) -> Many[tuple[float, Sequence]]:
        """Guess the next tokens of each sequence, and return the drafts that the step should verify, see `_offers`.

        room   most drafts of the step
        known  whether the step is imagined to follow the known tokens, without those in flight
        """
        count = len(decoding)
        self._considered, self._gain = True, 0.0
        found: Many[tuple[float, Sequence]] = []
        if self._is_hopeless(count):
            self._costs.forget(count + 1, (True, self._masked))
        elif offers := self._offered(decoding, known=known):
            found = self._worthwhile(count, offers, room)
        self._mean_gain += GAIN_RATE * (self._gain - self._mean_gain)
        return found

    def _offered(self, decoding: list[Sequence], *, known: bool) -> list[tuple[float, Sequence]]:
        """Guess the next tokens of each sequence, and return all drafts, see `_offers`."""
        count = len(decoding)
        offers: list[tuple[float, Sequence]] = []
        for seq in decoding:
            if seq.skips and count >= MANY:
                seq.skips -= 1
                seq.drafts = []
                continue
            unknown = 0 if known else seq.in_flight
            end = len(seq.tokens) + unknown
            most = min(self.most, seq.limit - end - 1, seq.regime_limit - end)
            self._sought += 1
            self._observe(seq)
            seq.skips = min(MOST_SKIPPED, seq.misses // MISSES)
            guess = _guessed(seq, unknown + max(most, 1))
            seq.drafts = guess
            offers += self._offers(seq, guess, unknown, most)
        return offers

    def _offers(self, seq: Sequence, guess: list[int], unknown: int, most: int) -> Iterator[tuple[float, Sequence]]:
        """Iterate over the first `most` drafts of a guess behind its first `unknown` tokens: by how much each raises
        the logarithm of the sequence's expected tokens, and the sequence.
        """
        run = seq.drafter.run
        # A sure guess says nothing of other guesses, so it is not compared with the tokens that follow.
        seq.guess = (0, [], 0) if seq.drafter.sure else (len(seq.tokens), guess, run)
        chance, expected, agreement, kinds = 1.0, 1.0, seq.agreement, CLASS[run]
        for place in range(min(len(guess), unknown + most)):
            if not seq.drafter.sure:
                chance *= agreement[kinds[place]]
            if not place and chance < LEAST:
                return
            if place >= unknown:
                yield log(1.0 + chance / expected), seq
                expected += chance

    def draft(self, plan: StepPlan, seq: Sequence, end: int, most: int) -> int:
        """Add the chosen drafts to a span that ends at `end` with the last planned token of `seq`; return their number.

        most  most drafts
        """
        drafts = min(self.chosen.pop(seq, 0), most)  # nothing holds a sequence that has ended
        if drafts > 0 and end + drafts > seq.covered:
            drafts = self._cover(plan, seq, end, drafts)
        if drafts <= 0:
            return 0
        assert seq.row is not None
        plan.drafts.append(Draft(seq.row, len(seq.tokens), seq.drafts[: seq.in_flight + drafts]))
        return drafts

    def took(self, plan: StepPlan, seconds: float, *, masked: bool, late: bool = False) -> None:
        """Learn what a step costs, if it only decodes.

        masked  whether the step waited for a mask
        late    whether it was issued only once the step before was committed, although others are issued ahead
        """
        self._masked, count, gain = masked, len(plan.spans), SPARE
        if self._rests(count) and not plan.drafts and plan.number % LEARNED:
            self._credit += gain  # nothing else, because it would cost time in every step
            return
        if all(span.count == span.samples for span in plan.spans):
            costs, kind = self._costs, (bool(plan.drafts), masked)
            took = costs.log(plan.tokens, kind, late=late) + costs.learn(plan.tokens, kind, seconds, late=late)
            if plan.drafts:
                gain += log(1 + self._kept / count) + costs.log(count, (False, masked)) - took
            self._learned += 1
            if self._learned == RECONSIDERED:
                self._learned = 0
                self._hopeless.clear()
                self._alone.clear()
        spent = self._sought * SEEKING_S / max(seconds, SEEKING_S)
        self._credit = max(-DEBT, min(CREDIT, self._credit + gain - spent))
        self._sought = self._kept = 0

    def pays_alone(self, count: int) -> bool:
        """Return whether drafts of one of `count` sequences pay, if all are right and the others have none.

        To seek them costs processor time that the steps lack, so they must gain as much as drafts after none.
        """
        if (pays := self._alone.get(count)) is None:
            kind, late, plain = (True, self._masked), self._late, self._costs.log(count, (False, self._masked))
            pays = self._alone[count] = any(
                log(1 + drafts) > count * (self._costs.log(count + drafts, kind, late=late) - plain + WORTH)
                for drafts in range(1, self.most + 1)
            )
        return pays

    def count(self, seq: Sequence, drafts: int, kept: int) -> None:
        """Count a committed span. kept: number of its drafts that were kept."""
        self.drafts += 1
        self.drafted += drafts
        self._kept += kept
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
        start, guess, run = seq.guess
        if not seq.agreement:
            seq.agreement = self._agreement.copy()
        right = seq.drafter.sure or (bool(guess) and seq.tokens[start : start + 1] == guess[:1])
        seq.misses = 0 if right else seq.misses + 1
        for place, (guessed, token) in enumerate(zip(guess, seq.tokens[start : start + len(guess)], strict=False)):
            agrees, kind = guessed == token, CLASS[run][place]
            seq.agreement[kind] += RATE * (agrees - seq.agreement[kind])
            self._agreement[kind] += COMMON_RATE * (agrees - self._agreement[kind])
            if not agrees:
                return

    def _worthwhile(self, count: int, offers: list[tuple[float, Sequence]], room: int) -> Many[tuple[float, Sequence]]:
        """Return the offered drafts that the step should verify.

        count   number of sequences in the step
        offers  see `_offers`
        room    most drafts of the step
        """
        costs, kind, late, gain = self._costs, (True, self._masked), self._late, 0.0
        plain = costs.log(count, (False, self._masked), late=late)
        most, best = 0.0 if self._drafting else count * WORTH, 0
        offers.sort(key=itemgetter(0), reverse=True)  # a sequence's first drafts stay before its others
        for drafts, (more, _) in enumerate(offers[:room], 1):
            gain += more
            net = gain - count * (costs.log(count + drafts, kind, late=late) - plain)
            if net > most + TIE:
                best, most = drafts, net
        self._drafting = best > 0
        if best:
            self._gain = most / count
        else:
            costs.forget(count + 1, kind)
        return offers[:best]

    def _rests(self, count: int) -> bool:
        """Return whether no drafts of `count` sequences are sought now, because the credit is spent.

        Drafts that were found, and for which the next step waits, are sought once more.
        """
        return count >= MANY and self._credit <= 0 and not self._gain

    def _is_hopeless(self, count: int) -> bool:
        """Return whether drafts of `count` sequences do not pay, even if all are right. Then nothing is guessed."""
        if (hopeless := self._hopeless.get(count)) is None:
            costs, kind, most = self._costs, (True, self._masked), self.most * count
            plain = costs.log(count, (False, self._masked)) - log(count)
            # The cost beyond the measured rows is a straight line, so the largest number stands for those between.
            tried = (*range(1, min(most, MEASURED)), most)
            hopeless = all(
                costs.log(count + drafts, kind, late=self._late) - log(count + drafts) >= plain for drafts in tried
            )
            self._hopeless[count] = hopeless
        return hopeless


def _guessed(seq: Sequence, most: int) -> list[int]:
    """Return at most `most` guesses of a sequence's drafter, which is dropped if it fails: drafts change no answer."""
    try:
        return seq.drafter.draft(seq.tokens, most)
    except Exception:
        _LOG.exception("a drafter failed; its answer is decoded without drafts")
        seq.drafter = NO_DRAFTS
        return []
