"""Order the waiting sequences of several tenants by weighted shares of work.

Each tenant has a line, ordered by place (policy.py). The next sequence comes from the line that has had the least work
for its share: start-time fair queueing (Goyal, Vin and Cheng 1996) in tokens computed and generated. A line's tag is
the virtual time of its next turn; a turn adds the sequence's work, divided by the tenant's share, to the tag. The work
of a sequence is estimated when it starts, and corrected when it ends. A line that was empty begins at the virtual time
of the latest start, less the work of average sequences in the tenant's share of the rows, because the other tenants
have been charged for those that run. Beyond that, idle tenants save nothing up.

A level of priority is worth `patience` average sequences between tenants too. It moves a line's turn, not its tag and
not the virtual time, so that a tenant's share does not grow with its priorities, and a late priority puts no tenant
that arrives next behind it.

A tenant that asks for no more than its share of the rows is modest. It waits for no other tenant's long answers and
prompts: a tenant with more than its share of the running sequences gives way. With one tenant all of this returns at
once, and the order is that of places.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import TYPE_CHECKING, Final

from infd.scheduler.policy import by_place, clamped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Many

    from infd.scheduler.sequence import Sequence

Turn = tuple[float, int, str]  # virtual time, number of the line's latest start, tenant; smaller turns are earlier

SMOOTHING: Final = 1 / 8  # weight of the latest value in an average
FIRST_ANSWER: Final = 128.0  # tokens that an answer is estimated at until one of the tenant has ended
MOST_LINES: Final = 1024  # beyond these, lines without sequences are forgotten


class Line:
    """One tenant's waiting sequences, ordered by place, and its account.

    running   sequences of the tenant that run
    tag       virtual time of the next turn
    latest    number of the latest start
    answer    average generated tokens of the tenant's sequences
    turn      the line's entry in the queue's order; None: no sequence waits
    """

    __slots__ = ("answer", "latest", "running", "sequences", "share", "tag", "tenant", "turn")

    def __init__(self, tenant: str, share: float, tag: float) -> None:
        self.tenant = tenant
        self.share = share
        self.sequences: list[Sequence] = []
        self.running = 0
        self.tag = tag
        self.latest = 0
        self.answer: float | None = None  # None: none has ended
        self.turn: Turn | None = None

    @property
    def busy(self) -> bool:
        return self.running > 0 or bool(self.sequences)

    def work(self, seq: Sequence) -> float:
        """Estimate the tokens that a sequence costs: its prompt, unless cached, and an average answer."""
        prompt = seq.prompt_tokens - (seq.prompt_cached or 0)
        answer = FIRST_ANSWER if self.answer is None else self.answer
        return max(1.0, prompt + min(float(seq.limit - seq.prompt_tokens), answer))


class FairQueue:
    """The waiting sequences; iteration yields them in the order of their turns."""

    def __init__(self, rows: int, patience: int) -> None:
        self._rows = rows
        self._patience = patience
        self._lines: dict[str, Line] = {}  # by tenant
        self._order: list[Turn] = []  # of the lines in which a sequence waits
        self._waiting = self._running = 0  # numbers of sequences
        self._shares: dict[str, float] = {}  # of the tenants whose sequences wait or run
        self._all_shares = 0.0  # their sum
        self._now = 0.0  # virtual time: the greatest tag, before its charge, of a line from which a sequence started
        self._highest = 0.0  # latest tag of any line
        self._floor = 0.0  # earliest tag of a new line: the latest when nothing ran or waited last
        self._starts = 0
        self._average = 1.0  # work of a sequence

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        if len(self._order) == 1:
            return iter(self._line_of(self._order[0]).sequences)
        return self._merged()

    def of(self, tenant: str) -> int:
        """Return how many sequences of a tenant wait."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.sequences)

    @property
    def contested(self) -> bool:
        """Whether a sequence waits beside another tenant's sequences."""
        return len(self._shares) > 1 and self._waiting > 0

    @property
    def first(self) -> Sequence:
        return self._line_of(self._order[0]).sequences[0]

    def candidates(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of their turns, while the caller may start the one yielded last."""
        while self._order:
            line = self._line_of(self._order[0])
            seq = line.sequences[0]
            yield seq
            if line.sequences and line.sequences[0] is seq:
                later = list(self)
                yield from later[1:]
                return

    # Changes

    def add(self, seq: Sequence) -> None:
        request = seq.request
        line = self._lines.get(request.tenant)
        if line is None:
            if len(self._lines) >= MOST_LINES:
                self._lines = {tenant: line for tenant, line in self._lines.items() if line.busy}
            line = self._lines[request.tenant] = Line(request.tenant, request.share, -inf)
        line.share = request.share
        self._all_shares += line.share - self._shares.get(line.tenant, 0.0)
        self._shares[line.tenant] = line.share
        if not line.sequences:
            line.tag = max(line.tag, self._beginning)
        insort(line.sequences, seq, key=by_place)
        self._waiting += 1
        if line.sequences[0] is seq:
            self._place(line)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that will not run, or not now."""
        line = self._lines[seq.request.tenant]
        self._take(line, seq)
        self._place(line)
        self._leave(line)

    def start(self, seq: Sequence) -> None:
        """Move a sequence to the running ones, and charge its tenant; a preempted sequence was charged before."""
        line = self._lines[seq.request.tenant]
        self._now = max(self._now, line.tag)
        self._take(line, seq)
        line.running += 1
        self._running += 1
        self._starts += 1
        line.latest = self._starts
        if not seq.charged:
            seq.charged = line.work(seq)
            line.tag += seq.charged / line.share
            self._highest = max(self._highest, line.tag)
            self._average += (seq.charged - self._average) * SMOOTHING
        self._place(line)

    def stop(self, seq: Sequence) -> None:
        """Remove a sequence from the running ones: it has ended, or the caller adds it again."""
        line = self._lines[seq.request.tenant]
        line.running -= 1
        self._running -= 1
        self._leave(line)

    def settle(self, seq: Sequence) -> None:
        """Correct the charge of a sequence that ends by the work that it cost. The caller removes the sequence next."""
        if not seq.charged:
            return
        line = self._lines.get(seq.request.tenant)
        if line is None:
            return  # the sequence was on hold, and the tenant's line is forgotten
        work = max(1.0, float(seq.prompt_tokens - (seq.prompt_cached or 0) + seq.generated))
        line.tag += (work - seq.charged) / line.share
        self._highest = max(self._highest, line.tag)
        if seq.limit > seq.prompt_tokens:
            answer = seq.generated if line.answer is None else line.answer
            line.answer = answer + (seq.generated - answer) * SMOOTHING
        seq.charged = 0.0
        self._place(line)

    # Tenants beyond their share give way

    def modest(self, tenant: str) -> bool:
        """Whether a tenant's sequences, waiting and running, need no more than its share of the rows."""
        line = self._lines[tenant]
        return (len(line.sequences) + line.running) * self._all_shares <= self._rows * line.share

    def exceeds(self, tenant: str) -> bool:
        """Whether a tenant has more than its share of the running sequences, and more than one."""
        line = self._lines[tenant]
        return line.running > 1 and line.running * self._all_shares > self._running * line.share

    def can_give(self, tenant: str, other: str) -> bool:
        """Whether a tenant with one running sequence less has, for its share, no fewer than `other` with one more."""
        giver, taker = self._lines[tenant], self._lines[other]
        return giver.running > 1 and (giver.running - 1) * taker.share >= (taker.running + 1) * giver.share

    def victim(self, latest: Iterator[Sequence]) -> Sequence:
        """Return which of the running sequences is preempted, so that others can continue.

        latest  the sequences that may be preempted, from the last in queue order; at least one

        The first of a tenant that exceeds its share; if there is none, the first. A tenant's earliest sequence is not
        preempted for exceeding a share, so the earliest of all is not preempted for another, and ends.
        """
        if len(self._shares) < 2:
            return next(latest)
        sequences = list(latest)
        return next((seq for seq in sequences if self.exceeds(seq.request.tenant)), sequences[0])

    def displaced(self, running: Many[Sequence]) -> Sequence | None:
        """Return the running sequence that gives way to the first waiting one, which finds no room; None: none does."""
        tenant = self.first.request.tenant
        if not self.modest(tenant):
            return None
        return next((seq for seq in reversed(running) if self.can_give(seq.request.tenant, tenant)), None)

    def in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Return running prompts in the order in which they use a step: those of modest tenants first."""
        if len(prompts) < 2 or len(self._shares) < 2:
            return prompts
        return sorted(prompts, key=lambda seq: not self.modest(seq.request.tenant))

    def kept(self, prompts: list[Sequence], tokens: int) -> int:
        """Return how many of a step's `tokens` the running prompts leave to the first waiting sequence.

        A modest tenant's sequence, if no prompt of the tenant runs, gets the tenant's share.
        """
        if not prompts or not self.contested:
            return 0
        first = self.first
        tenant = first.request.tenant
        if not self.modest(tenant) or any(seq.request.tenant == tenant for seq in prompts):
            return 0
        share = self._lines[tenant].share / self._all_shares
        return min(len(first.tokens) * first.token_cost, int(tokens * share))

    def verify(self, running: Many[Sequence]) -> None:
        """Assert the order of every line, and that all counts add up."""
        counts: dict[str, int] = {}
        for seq in running:
            counts[seq.request.tenant] = counts.get(seq.request.tenant, 0) + 1
        for line in self._lines.values():
            assert line.running == counts.pop(line.tenant, 0), "a tenant's running sequences are miscounted"
            assert line.sequences == sorted(line.sequences, key=by_place), "a line is out of order"
            assert (line.turn is None) == (not line.sequences)
            assert line.busy == (line.tenant in self._shares)
        assert not counts
        assert len(running) == self._running
        assert sum(len(line.sequences) for line in self._lines.values()) == self._waiting
        assert self._order == sorted(line.turn for line in self._lines.values() if line.turn is not None)

    # Lines

    @property
    def _beginning(self) -> float:
        """The tag of a new line."""
        return max(self._floor, self._now - self._average * self._rows / self._all_shares)

    def _line_of(self, turn: Turn) -> Line:
        return self._lines[turn[2]]

    def _take(self, line: Line, seq: Sequence) -> None:
        at = bisect_left(line.sequences, seq.place, key=by_place)
        while line.sequences[at] is not seq:  # sequences of a beam search share one place
            at += 1
        del line.sequences[at]
        self._waiting -= 1

    def _place(self, line: Line) -> None:
        """Move a line to its place in the order, after a change of its tag or of its first sequence."""
        if line.turn is not None:
            del self._order[bisect_left(self._order, line.turn)]
            line.turn = None
        if line.sequences:
            ahead = clamped(line.sequences[0].request.priority) * self._patience * self._average
            line.turn = line.tag + ahead, line.latest, line.tenant
            insort(self._order, line.turn)

    def _leave(self, line: Line) -> None:
        """Remove the share of a tenant without sequences."""
        if line.busy:
            return
        self._all_shares -= self._shares.pop(line.tenant)
        if not self._shares:
            self._all_shares = 0.0
            self._floor = self._highest  # no sequence waits, so earlier work has delayed none

    def _merged(self) -> Iterator[Sequence]:
        """Yield all waiting sequences in the order of their turns, as these are expected now."""
        turns = [(turn, list(self._line_of(turn).sequences), 0) for turn in self._order]
        heapify(turns)
        starts = self._starts
        while turns:
            (tag, _, tenant), sequences, at = turns[0]
            seq = sequences[at]
            yield seq
            starts += 1
            if at + 1 == len(sequences):
                heappop(turns)
            else:
                line = self._lines[tenant]
                after = tag + line.work(seq) / line.share
                heapreplace(turns, ((after, starts, tenant), sequences, at + 1))
