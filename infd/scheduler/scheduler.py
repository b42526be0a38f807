"""Decide what each step computes.

Plain integers only: no torch, no clock, no await. There is no prefill or
decode phase; a sequence is simply owed the tokens not yet computed.

Steps run strictly in the order planned. Pages and rows let go here may
therefore be granted in the very next plan, even while earlier steps that use
them are still in flight.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.request import FinishReason
from infd.scheduler.adapters import AdapterSlots
from infd.scheduler.cache import Cache
from infd.scheduler.fitting import StepSize
from infd.scheduler.plan import Grant, Join, Span, StepPlan
from infd.scheduler.policy import Policy, by_need, by_order

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable
    from collections.abc import Sequence as Many

    from infd.request import TokenLogprobs
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepResult
    from infd.scheduler.sequence import Sequence


class Outcome(Struct, gc=False):
    """What a step brought to one sequence, and whether that ended it.

    prompt_logprobs  of the whole prompt, with its first outcome, where asked
    prompt_computed  tokens of the prompt that were not in the cache, with its first outcome
    """

    seq: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None
    prompt_logprobs: Many[TokenLogprobs] = ()
    prompt_computed: int = 0


class Scheduled(Struct):
    """A planned step.

    sequences  the sequence of each of the plan's spans
    """

    plan: StepPlan
    sequences: list[Sequence]

    @property
    def admitted(self) -> list[Sequence]:
        """Return the sequences that join with this step: theirs are its last spans, in the order of the joins."""
        return self.sequences[len(self.sequences) - len(self.plan.joins) :]


class Scheduler:
    """Sequences, and the pages and rows they share.

    waiting and running are each in the order of arrival (`policy.py`). A
    running sequence holds a row and pages; a preempted one waits again, in its
    old place. One whose reader has fallen behind is held: it stands in neither.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        priority_patience: int = 64,
        prefix_caching: bool = True,
        max_adapters: int = 0,
        max_adapters_per_step: int = 0,
    ) -> None:
        self.capacity = capacity
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.cache = Cache(capacity, prefix_caching=prefix_caching)
        self.adapters = AdapterSlots(max_adapters, max_adapters_per_step)
        self.preemptions = 0  # for want of pages
        self.undone = 0  # steps, because one failed
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # and found
        self._policy = Policy(priority_patience)
        mixed = (capacity.mixed_tokens, capacity.crowded_tokens) if capacity.layout.divisible else (None, None)
        self._size = StepSize(capacity.step_tokens, *mixed)
        self._rows = list(range(capacity.rows - 1, -1, -1))
        self._number = 0
        self._held: set[Sequence] = set()
        self._refused: tuple[Sequence, int] | None = None  # who did not fit, and into how many pages

    # The caller's side

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its request has been checked: it fits max_model_len."""
        assert seq.prompt_tokens < self.capacity.max_model_len
        seq.limit = min(seq.limit, self.capacity.max_model_len)
        seq.weight = self.capacity.score_cost if seq.scoring else 1
        seq.order = self._policy.place(seq.request.priority)
        insort(self.waiting, seq, key=by_order)

    def remove(self, seq: Sequence, finish: FinishReason, failure: BaseException | None = None) -> None:
        """End a sequence now. What steps in flight still compute for it is dropped."""
        if seq.finish is not None:
            return
        seq.finish, seq.failure = finish, failure
        self._take_out(seq)

    def hold(self, seq: Sequence) -> None:
        """Compute nothing more for a sequence until `resume`. Meanwhile it has neither a row nor pages.

        What steps in flight still compute for it is dropped, and computed again when it goes on.
        """
        if seq.finish is None and seq not in self._held:
            seq.dropped_through = self._number - 1
            self._take_out(seq)
            self._held.add(seq)

    def holds(self, seq: Sequence) -> bool:
        return seq in self._held

    def resume(self, seq: Sequence) -> None:
        """Send a sequence, if it is held, back to its old place in the queue."""
        if seq in self._held:
            self._held.remove(seq)
            insort(self.waiting, seq, key=by_order)

    def plan(self, only: Container[Sequence] | None = None) -> Scheduled | None:
        """Fill the next step, of these sequences `only` if given; return None if nothing can be computed now."""
        step = Scheduled(StepPlan(self._number, [], [], [], []), [])
        decoding, others = by_need(self.running)
        prompts = self._prompts(others)
        left = self._fill(step, decoding, self._size.tokens, only)
        left = self._fill(step, others, min(left, self._size.beside(len(step.sequences), prompts)), only)
        if self.waiting and left:
            self._admit(step, left, only)
        if not step.sequences:
            return None
        self._number += 1
        return step

    def commit(self, step: Scheduled, result: StepResult) -> list[Outcome]:
        """Take in what a step produced, in the order planned. Sequences removed or held since then are passed over."""
        plan = step.plan
        self._size.fitted()
        outcomes: list[Outcome] = []
        at = 0
        for i, (seq, span) in enumerate(zip(step.sequences, plan.spans, strict=True)):
            accepted = result.accepted[i]
            tokens = result.tokens[at : at + accepted]
            at += accepted
            if span.samples:
                seq.in_flight -= 1
            outcome, failure = None, result.failed[i].error() if i in result.failed else None
            if seq.finish is not None or plan.number <= seq.dropped_through:
                if failure is not None:
                    self.cache.withdraw(seq)
                continue
            try:
                if failure is None:
                    outcome = self._take_in(plan.number, seq, span, tokens, i, result)
            except Exception as error:  # fault point "commit": whatever it is, it is this sequence's
                failure = error
            if failure is not None:
                outcome = self._fail(seq, failure)
                if i not in result.failed:
                    self.verify()
            if outcome is not None:
                outcomes.append(outcome)
        self.cache.settle(plan.number)
        return outcomes

    def rollback(self, steps: Iterable[Scheduled]) -> None:
        """Undo steps that failed: all those in flight, in any order.

        Their sequences go back to the queue, in their old places, with the
        tokens known so far; pages that these steps were to fill leave the index.
        """
        steps = list(steps)
        self.undone += len(steps)
        for step in steps:
            self.cache.spoil(step.plan.number)
            for seq, span in zip(step.sequences, step.plan.spans, strict=True):
                if span.samples:
                    seq.in_flight -= 1
                if seq.row is not None:
                    self._send_back(seq)
        for step in steps:  # only now: a later step's sequences may use what an earlier one was to load
            self.adapters.undo(step.plan.loads)

    def forget_prefixes(self, root: Callable[[Sequence], bytes], *, preempting: bool) -> int:
        """Empty the prefix cache, and give every sequence the root of its prefixes anew; return the pages forgotten.

        preempting  send those that run back to their places in the queue, to be computed again from their first
                    token; else they go on with what they hold, of which no page is offered to anybody any more
        """
        if preempting:
            for seq in list(self.running):
                self._send_back(seq)
        for seq in (*self.waiting, *self.running, *self._held):
            seq.prefix_root = root(seq)
            seq.keys.clear()
            if seq.row is not None:
                seq.indexed = seq.limit
        return self.cache.forget()

    def shrink(self, step: Scheduled) -> bool:
        """Plan steps of half the size of this one from now on, for a while; False if it cannot be halved."""
        plan = step.plan
        if plan.tokens < 2 or not self.capacity.layout.divisible:
            return False
        self._size.shrink(sum(span.count * (self.capacity.score_cost if span.scores else 1) for span in plan.spans))
        return True

    def verify(self) -> None:
        """Assert every invariant of pages, rows and slots."""
        everybody = [*self.waiting, *self.running, *self._held]
        self.cache.verify(everybody)
        rows = [seq.row for seq in self.running if seq.row is not None]
        assert sorted(self._rows + rows) == list(range(self.capacity.rows)), "a row is lost or held twice"
        self.adapters.verify(seq.adapter for seq in self.running)
        assert all(seq.row is None and not seq.computed for seq in (*self.waiting, *self._held))
        assert all(seq.finish is None and seq.in_flight >= 0 for seq in everybody)
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=by_order), "a queue is out of order"

    # One sequence, one step

    def _grant(self, step: Scheduled, seq: Sequence, left: int) -> int:
        """Add a span that takes at most `left` of the step; return how much it took, 0 if it cannot go on now.

        A span cut short takes all that is left, even what its weight leaves over: nobody is admitted before its end.
        """
        plan = step.plan
        planned = len(seq.tokens) + seq.in_flight
        count = (planned if planned < seq.limit else seq.limit - 1) - seq.computed
        if not count or seq.row is None:
            return 0  # its last token is in flight, or it was preempted a moment ago
        if seq.computed >= seq.longest:
            self._send_back(seq)  # its next token belongs to another regime, and so do then all before it
            return 0
        taken = count * seq.weight
        if taken > left:
            if not self.capacity.layout.divisible:
                return 0
            count, taken = max(1, left // seq.weight), left
        end = seq.computed + count
        if end > seq.covered and not self._cover(plan, seq, end):
            return 0
        samples = end == planned
        if samples:
            seq.in_flight += 1
        scores = max(0, min(end, seq.prompt_tokens - 1) - seq.computed) if seq.scoring else 0
        plan.spans.append(Span(seq.row, seq.computed, count, samples, scores))
        step.sequences.append(seq)
        seq.computed = end
        seq.step = plan.number
        if end - seq.indexed >= self.cache.page_tokens:
            self.cache.offer(seq, plan.number)
        return taken

    def _fill(self, step: Scheduled, sequences: list[Sequence], left: int, only: Container[Sequence] | None) -> int:
        """Let sequences draw from the tokens left of a step, in this order; return how many are left then."""
        for seq in sequences:
            if not left:
                break
            if only is None or seq in only:
                left -= self._grant(step, seq, left)
        return left

    def _prompts(self, others: Many[Sequence]) -> int:
        """Return how many requests wait for their first token, beside those that no row is free for."""
        near = (*others, *self.waiting[: len(self._rows)])
        return len({id(seq.request) for seq in near if not seq.generated})

    def _admit(self, step: Scheduled, left: int, only: Container[Sequence] | None) -> None:
        """Let waiting sequences run, in order, while there is room for the first of them.

        While one waits because as many adapters run as may, some of those behind it that need no other go ahead.
        While one waits for its last step, those behind it take what it will not need. A choice waits until all scores
        of its prompt, which the first choice computes, are planned: they are the first news of every choice.
        """
        position, first = 0, None
        promised_rows = promised_pages = 0
        while left and len(self._rows) > promised_rows and position < len(self.waiting):
            seq = self.waiting[position]
            if (seq, self.cache.pool.available) == self._refused:
                return  # nothing has changed since it was found not to fit
            if (only is not None and seq not in only) or (seq.first is not None and seq.first.owes_scores):
                position += 1
                continue
            if first is not None and not self._policy.may_pass(seq, first):
                return
            if not self.adapters.fits(seq.adapter):
                first = first or seq
                position += 1
                continue
            if seq.in_flight:  # it was sent back; it can be planned once its last step commits
                promised_rows += 1
                promised_pages += self.cache.wanted(seq, 0)
                position += 1
                continue
            if not self.capacity.layout.divisible and len(seq.tokens) > left:
                return
            seq.govern(self.capacity.layout.regimes)
            hit = self.cache.find(seq)
            wanted = self.cache.wanted(seq, len(self.running)) + promised_pages
            if wanted > self.cache.pool.available and (self.running or promised_rows):
                seq.tables = []
                if not promised_rows:
                    self._refused = seq, self.cache.pool.available
                return
            self._seat(seq, position, hit)
            slot = self.adapters.take(seq.adapter, step.plan.loads)
            granted = self._grant(step, seq, left)
            assert granted, "an admitted sequence has room for its first span"
            left -= granted
            step.plan.joins.append(self._join(seq, slot))

    def _seat(self, seq: Sequence, position: int, hit: int) -> None:
        """Move a waiting sequence to a row, holding the pages that were found for it."""
        del self.waiting[position]
        insort(self.running, seq, key=by_order)
        seq.row = self._rows.pop()
        self.cache.hold(seq, hit)
        if seq.prompt_cached is None:
            seq.prompt_cached = min(hit, seq.prompt_tokens)
            if self.cache.looks_up(seq):
                self.prefix_queries += seq.prompt_tokens
                self.prefix_hits += seq.prompt_cached

    def _join(self, seq: Sequence, slot: int) -> Join:
        assert seq.row is not None
        return Join(
            row=seq.row,
            tokens=list(seq.tokens),
            prompt_tokens=seq.prompt_tokens,
            sampling=seq.request.sampling,
            end_ids=seq.request.end_ids,
            tables=[list(table) for table in seq.tables],
            seed=seq.seed,
            slot=slot,
            regime=seq.regime,
        )

    def _cover(self, plan: StepPlan, seq: Sequence, end: int) -> bool:
        """Take the pages for tokens [computed, end), preempting later sequences if there is no other way."""
        shortage = self.cache.shortage(seq, end)
        while self.cache.pool.available < shortage:
            victim = next(s for s in reversed(self.running) if s.step != plan.number)
            if victim is seq:
                return False  # it keeps what it holds and goes on when others have finished
            self._preempt(victim)
        granted = self.cache.extend(seq, end)
        if seq.step >= 0:  # else its join tells of them
            assert seq.row is not None
            plan.grants += [Grant(seq.row, group, index, page) for group, index, page in granted]
        return True

    def _take_in(
        self, step: int, seq: Sequence, span: Span, tokens: list[int], number: int, result: StepResult
    ) -> Outcome | None:
        """Take in what `step` brought to its span of this number; None if that is no news to anybody."""
        if span.scores and seq.scoring:
            seq.score(span.start, result.prompt_logprobs[number])
        if tokens:
            kept = self._append(seq, tokens, step)
            logprobs = result.logprobs[number][:kept] if number in result.logprobs else []
            outcome = Outcome(seq, tokens if kept == len(tokens) else tokens[:kept], logprobs, seq.finish)
        elif seq.idle:
            self.remove(seq, FinishReason.LENGTH)
            outcome = Outcome(seq, [], [], seq.finish)
        else:
            return None
        if seq.generated == len(outcome.tokens):
            outcome.prompt_computed = seq.prompt_tokens - (seq.prompt_cached or 0)
        if seq.prompt_logprobs:
            outcome.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
        return outcome

    def _append(self, seq: Sequence, tokens: list[int], step: int) -> int:
        """Add the tokens that `step` sampled, up to the first that ends the sequence; return how many were kept."""
        known, end_ids = seq.tokens, seq.request.end_ids
        for kept, token in enumerate(tokens, 1):
            known.append(token)
            if token in end_ids and seq.generated > seq.request.sampling.min_tokens:
                self.remove(seq, FinishReason.STOP)
                return kept
            if len(known) >= seq.limit:
                self.remove(seq, FinishReason.LENGTH)
                return kept
        if seq.step > step:
            self.cache.offer(seq, seq.step)  # a step in flight computes tokens that were not known when it was planned
        return len(tokens)

    def _fail(self, seq: Sequence, failure: Exception) -> Outcome:
        """End a sequence in an error, even where it has just ended otherwise. Nobody may read what it has written."""
        self.cache.withdraw(seq)
        self.remove(seq, FinishReason.ERROR, failure)
        seq.finish, seq.failure = FinishReason.ERROR, failure
        return Outcome(seq, [], [], FinishReason.ERROR)

    def _preempt(self, seq: Sequence) -> None:
        """Make room for an earlier sequence."""
        self._send_back(seq)
        self.preemptions += 1

    def _send_back(self, seq: Sequence) -> None:
        """Send a running sequence back to its old place in the queue, to be recomputed."""
        self._let_go(seq)
        insort(self.waiting, seq, key=by_order)

    def _take_out(self, seq: Sequence) -> None:
        """Let a sequence stand nowhere, and have nothing."""
        if seq.row is not None:
            self._let_go(seq)
        elif seq in self._held:
            self._held.remove(seq)
        else:
            self.waiting.remove(seq)

    def _let_go(self, seq: Sequence) -> None:
        """Take row, pages and slot from a running sequence."""
        assert seq.row is not None
        self.running.remove(seq)
        self._rows.append(seq.row)
        seq.row = None
        self.adapters.release(seq.adapter)
        self.cache.release(seq)
        seq.step = -1
