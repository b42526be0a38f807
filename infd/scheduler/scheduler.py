"""Decide what each step computes.

Plain integers only: no torch, no clock, no await. There is no prefill or
decode phase: every sequence computes its known tokens that are not yet cached.

Steps run strictly in the order planned. Released pages and rows may therefore
be granted in the very next plan, even while earlier steps that use them are
still in flight.
"""

from __future__ import annotations

from bisect import insort
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.request import FinishReason, by_token
from infd.scheduler.adapters import AdapterSlots
from infd.scheduler.cache import Cache
from infd.scheduler.fair_queue import FairQueue
from infd.scheduler.plan import Grant, Join, Span, StepPlan
from infd.scheduler.policy import Policy, by_place, split_decoding
from infd.scheduler.resources import RowPool
from infd.scheduler.speculation import Speculation
from infd.scheduler.token_budget import TokenBudget
from infd.telemetry.expert_loads import ExpertLoads

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable
    from collections.abc import Sequence as Many

    from infd.request import Pooled, TokenLogprobs
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepResult
    from infd.scheduler.resources import Resource
    from infd.scheduler.sequence import QueuePlace, Sequence


class Outcome(Struct, gc=False):
    """A step's output for one sequence, and whether the step ended the sequence.

    prompt_logprobs  log-probabilities of the whole prompt, if requested; only in the sequence's first outcome
    prompt_computed  number of prompt tokens that were not cached; only in the sequence's first outcome
    pooled           the numbers of the prompt, if requested; in the sequence's only outcome
    """

    seq: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None
    prompt_logprobs: Many[TokenLogprobs] = ()
    prompt_computed: int = 0
    pooled: Pooled | None = None


class Scheduled(Struct):
    """A planned step.

    sequences  the sequence of each of the plan's spans
    """

    plan: StepPlan
    sequences: list[Sequence]

    @property
    def admitted(self) -> list[Sequence]:
        """The sequences admitted to this step: the sequences of the last spans, in the order of the joins."""
        return self.sequences[len(self.sequences) - len(self.plan.joins) :]


class Scheduler:
    """Sequences, and the resources they share.

    `running` is in the order of places (`policy.py`), `waiting` too within each
    tenant (`fair_queue.py`). A running sequence holds its share of each resource;
    a preempted sequence returns to its old place in `waiting`. A sequence on hold,
    whose reader is paused, is in neither.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        priority_patience: int = 64,
        prefix_caching: bool = True,
        max_adapters: int = 0,
        max_adapters_per_step: int = 0,
        max_drafts: int = 0,
    ) -> None:
        self.capacity = capacity
        self.waiting = FairQueue(capacity.rows, priority_patience)
        self.running: list[Sequence] = []
        self.budget = TokenBudget(capacity)
        self.rows = RowPool(capacity.rows)
        self.cache = Cache(capacity, prefix_caching=prefix_caching)
        self.adapters = AdapterSlots(max_adapters, max_adapters_per_step)
        # In the order of admission's checks: the cheapest first, since most plans admit no sequence.
        self.resources: tuple[Resource, ...] = (self.budget, self.rows, self.adapters, self.cache)
        # Where chunks begin is computed from the host's lengths, which are upper bounds while drafts are in flight.
        chunked = any(group.chunk is not None for group in capacity.layout.groups)
        self.speculation = Speculation(self.cache, 0 if chunked else max_drafts, capacity.row_costs)
        self.preemptions = 0  # sequences preempted because pages ran out
        self.undone = 0  # steps rolled back
        self.prefix_queries = 0  # prompt tokens looked up in the cache
        self.prefix_hits = 0  # prompt tokens found in the cache
        self.expert_loads = ExpertLoads(0 if capacity.experts is None else capacity.experts.experts)
        self._policy = Policy(priority_patience)
        self._number = 0  # number of the next plan
        self._held: set[Sequence] = set()

    # Queue and steps

    def add(self, seq: Sequence, place: QueuePlace | None = None, *, number: int = 0) -> None:
        """Queue a sequence. `EngineCore.check` has checked its prompt against max_model_len.

        place   its place; None: after the sequences queued earlier with its priority
        number  of the prompt among those of its ticket, see `Policy.place`
        """
        assert seq.prompt_tokens <= self.capacity.max_model_len - seq.uncomputed
        seq.limit = min(seq.limit, self.capacity.max_model_len)
        if seq.pooling is not None and self.capacity.pools_last:
            seq.whole = by_token(seq.pooling.want.task)
        seq.token_cost = self.capacity.score_cost if seq.scoring else 1
        seq.place = self._policy.place(seq, number) if place is None else place
        self.waiting.add(seq)

    def remove(self, seq: Sequence, finish: FinishReason, failure: BaseException | None = None) -> None:
        """End a sequence now. Tokens that steps in flight still compute for it are dropped."""
        if seq.finish is not None:
            return
        seq.finish, seq.failure = finish, failure
        self.waiting.settle(seq)
        self._dequeue(seq)

    def hold(self, seq: Sequence) -> None:
        """Compute nothing more for a sequence until `resume`, and release its share of every resource.

        Tokens that steps in flight still compute for it are dropped, and computed again after `resume`.
        """
        if seq.finish is None and seq not in self._held:
            seq.dropped_through = self._number - 1
            self._dequeue(seq)
            self._held.add(seq)

    def holds(self, seq: Sequence) -> bool:
        return seq in self._held

    def resume(self, seq: Sequence) -> None:
        """Return a sequence to its old place in the queue. Does nothing if the sequence is not on hold."""
        if seq in self._held:
            self._held.remove(seq)
            self.waiting.add(seq)

    def plan(self, only: Container[Sequence] | None = None, *, ahead: bool = False) -> Scheduled | None:
        """Fill the next step; return None if no sequence can be computed now.

        only   the sequences that may be planned; None: all
        ahead  whether it is issued because of `may_plan_ahead`; then it has no drafts
        """
        if not self.running and not self.waiting:
            return None
        step, budget = Scheduled(StepPlan(self._number, [], [], [], []), []), self.budget
        if self.waiting.contested and only is None:
            self._make_room()
        budget.remaining = budget.limit
        if self.running:
            self._continue(step, only, ahead=ahead)
        if self.waiting and budget.remaining:
            self._admit(step, only)
        if not step.sequences:
            return None
        self._number += 1
        return step

    def commit(self, step: Scheduled, result: StepResult) -> list[Outcome]:
        """Append a step's tokens to its sequences. Steps must be committed in order.

        Returns an outcome for each sequence that receives tokens or ends. An error in a sequence's output ends
        only this sequence. Output of sequences that were removed or held after the step was planned is dropped.
        """
        plan = step.plan
        outcomes: list[Outcome] = []
        at = 0
        for i, (seq, span) in enumerate(zip(step.sequences, plan.spans, strict=True)):
            accepted = result.accepted[i]
            tokens = result.tokens[at : at + accepted]
            at += accepted
            seq.in_flight -= span.samples
            if seq.row is not None:
                seq.computed -= span.samples - accepted
            outcome, failure = None, result.failed[i].error() if i in result.failed else None
            if span.samples > 1 and accepted:
                self.speculation.count(seq, span.drafts, accepted - 1)
            if seq.finish is not None or plan.number <= seq.dropped_through:
                if failure is not None:
                    self.cache.unindex(seq)
                continue
            try:
                if failure is None:
                    outcome = self._commit_span(plan.number, seq, span, tokens, i, result)
            except Exception as error:  # an error in `_commit_span` fails only this sequence
                failure = error
            if failure is not None:
                outcome = self._fail(seq, failure)
                if i not in result.failed:
                    self.verify()
            if outcome is not None:
                outcomes.append(outcome)
        for resource in self.resources:
            resource.settle(plan)
        self.speculation.committed()
        if result.expert_loads:
            self.expert_loads.add(result.expert_loads)
        return outcomes

    def rollback(self, steps: Iterable[Scheduled]) -> None:
        """Undo all steps in flight, in any order, because a step failed.

        The steps' sequences return to their old places in the queue, with the
        tokens known so far. Pages that the steps were to fill are removed from
        the prefix index.
        """
        steps = list(steps)
        self.undone += len(steps)
        for step in steps:
            for seq, span in zip(step.sequences, step.plan.spans, strict=True):
                seq.in_flight -= span.samples
                if seq.row is not None:
                    self._requeue(seq)
        for step in steps:  # after all releases, since a later step's sequences may use what an earlier step loads
            for resource in self.resources:
                resource.undo(step.plan)

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue, to free its pages for another sequence."""
        self._requeue(seq)
        seq.preemptions += 1
        self.preemptions += 1

    def forget_prefixes(self, root: Callable[[Sequence], bytes], *, preempting: bool) -> int:
        """Empty the prefix index, and change the root of every sequence's prefix keys.

        root        returns the new root of a sequence
        preempting  whether running sequences are recomputed from the first token; if not, they keep their pages, which
                    are never indexed again

        Returns the number of pages that were indexed.
        """
        if preempting:
            for seq in list(self.running):
                self._requeue(seq)
        for seq in (*self.waiting, *self.running, *self._held):
            seq.prefix_root = root(seq)
            seq.keys.clear()
            if seq.row is not None:
                seq.indexed = seq.limit
        return self.cache.forget()

    def shrink(self, step: Scheduled) -> bool:
        """Halve the token budget because a step did not fit in memory. Return False if the step cannot be halved."""
        plan = step.plan
        if plan.tokens < 2 or not self.capacity.layout.divisible:
            return False
        self.budget.halve(sum(span.count * (self.capacity.score_cost if span.scores else 1) for span in plan.spans))
        return True

    def verify(self) -> None:
        """Assert every invariant of the queues and of all resources."""
        for resource in self.resources:
            resource.verify(self.running)
        self.waiting.verify(self.running)
        idle = [*self.waiting, *self._held]
        assert not any(seq.row is not None or seq.computed or seq.tables or seq.slot for seq in idle)
        assert all(seq.finish is None and seq.in_flight >= 0 for seq in (*idle, *self.running))
        assert self.running == sorted(self.running, key=by_place), "the running sequences are out of order"

    @property
    def may_plan_ahead(self) -> bool:
        """Whether the next step may be planned while more steps are in flight than a prompt should wait for.

        That is so while there are running sequences, all of them decode, none waits, and drafts are not worth waiting
        for.
        """
        if self.waiting or not self.running:
            return False
        decoding, others = split_decoding(self.running)
        return not others and not (self.speculation.most and self.speculation.awaits(decoding))

    # Planning and committing one step

    def _continue(self, step: Scheduled, only: Container[Sequence] | None, *, ahead: bool) -> None:
        """Add spans of the running sequences: of those that decode, then of the others."""
        budget = self.budget
        decoding, others = split_decoding(self.running)
        starting = self._starting(others)
        if self.speculation.most:
            self.speculation.choose([] if ahead else decoding, budget.limit)
        remaining = self._fill(step, decoding, budget.limit, only)
        remaining = min(remaining, budget.mixed(step.plan.tokens, starting))
        kept = self.waiting.kept(others, remaining)
        budget.remaining = kept + self._fill(step, self.waiting.in_turn(others), remaining - kept, only)

    def _fill(
        self,
        step: Scheduled,
        sequences: list[Sequence],
        budget: int,
        only: Container[Sequence] | None,
    ) -> int:
        """Add a span of each sequence, in order, until the token budget is spent; return the remaining tokens."""
        for seq in sequences:
            if not budget:
                break
            if only is None or seq in only:
                budget -= self._add_span(step, seq, budget)
        return budget

    def _add_span(self, step: Scheduled, seq: Sequence, budget: int) -> int:
        """Add a span that costs at most `budget` tokens; return its cost, 0 if the sequence cannot be computed now.

        A truncated span costs the whole budget, even if less than score_cost is left over, so that no sequence is
        admitted after the span.
        """
        plan = step.plan
        planned = len(seq.tokens) + seq.in_flight
        count = (planned if planned < seq.limit else seq.limit - seq.uncomputed) - seq.computed
        if not count or seq.row is None:
            return 0  # the last token is in flight, or an earlier sequence of this step preempted `seq`
        if seq.computed >= seq.regime_limit:
            if seq.in_flight and len(seq.tokens) <= seq.regime_limit:
                return 0  # drafts in flight may be rejected, and the sequence remain in its regime
            self._requeue(seq)  # in its next regime the angles of all its tokens differ
            return 0
        cost = count * seq.token_cost
        if cost > budget:
            if not self.capacity.layout.divisible:
                return 0
            count, cost = max(1, budget // seq.token_cost), budget
        end = seq.computed + count
        if end > seq.covered and not self._allocate(plan, seq, end):
            return 0
        scores = max(0, min(end, seq.prompt_tokens - 1) - seq.computed) if seq.scoring else 0
        samples, pools = 0, 0 if seq.pooling is None else count
        if end == planned < seq.limit:
            drafts = self.speculation.draft(plan, seq, end, budget - cost) if self.speculation.chosen else 0
            samples = 1 + drafts
            end, count, cost = end + drafts, count + drafts, cost + drafts
            seq.in_flight += samples
        routes = 0 if seq.routing is None else count
        plan.spans.append(Span(seq.row, seq.computed, count, samples, scores, pools, routes))
        step.sequences.append(seq)
        seq.computed = end
        seq.last_step = plan.number
        if end - seq.indexed >= self.cache.page_tokens:
            self.cache.index_pages(seq, plan.number)
        return cost

    def _starting(self, others: Many[Sequence]) -> int:
        """Return how many requests wait for their first token, except those in the queue for which no row is free."""
        candidates = (*others, *islice(self.waiting, self.rows.available))
        return len({id(seq.request) for seq in candidates if not seq.generated})

    def _admit(self, step: Scheduled, only: Container[Sequence] | None) -> None:
        """Admit waiting sequences, in order, up to the first that does not fit.

        If a passable resource lacks room for a sequence, later sequences that fit are admitted before it, within the
        policy's patience. A sequence whose last step is not committed cannot be planned; its share is reserved. If a
        prompt is scored, its first choice computes the scores, and delivers them with its first token. Until that token
        is planned the other choices wait, because every choice delivers the scores before its first token.
        """
        reserved: list[Sequence] = []
        passed = None
        for seq in self.waiting.candidates():
            if (only is not None and seq not in only) or (seq.first is not None and seq.first.owes_scores):
                continue
            if passed is not None and not self._policy.may_pass(seq, passed):
                return
            if seq.in_flight:
                reserved.append(seq)
                continue
            seq.set_regime(self.capacity.layout.regimes)
            for resource in self.resources:
                if not resource.fits(seq, reserved):
                    if not resource.passable:
                        return
                    passed = passed or seq
                    break
            else:
                self._start(step, seq)

    def _make_room(self) -> None:
        """Preempt sequences of tenants beyond their share while the first in the queue finds no row or pages."""
        first = self.waiting.first
        if first.in_flight:
            return
        first.set_regime(self.capacity.layout.regimes)
        while not (self.rows.fits(first, ()) and self.cache.fits(first, ())):
            other = self.waiting.displaced(self.running)
            if other is None:
                return
            self.preempt(other)

    def _start(self, step: Scheduled, seq: Sequence) -> None:
        """Move a sequence from `waiting` to `running`, and add its first span."""
        plan = step.plan
        insort(self.running, seq, key=by_place)
        for resource in self.resources:
            resource.take(seq, plan)
        if seq.prompt_cached is None:
            seq.prompt_cached = min(seq.computed, seq.prompt_tokens)
            if self.cache.uses_prefix_cache(seq):
                self.prefix_queries += seq.prompt_tokens
                self.prefix_hits += seq.prompt_cached
        self.waiting.start(seq)
        self._policy.started(seq)
        cost = self._add_span(step, seq, self.budget.remaining)
        assert cost, "an admitted sequence has room for its first span"
        self.budget.remaining -= cost
        plan.joins.append(self._join(seq))

    def _join(self, seq: Sequence) -> Join:
        assert seq.row is not None
        return Join(
            row=seq.row,
            tokens=list(seq.tokens),
            prompt_tokens=seq.prompt_tokens,
            wants=seq.request.wants,
            tables=[list(table) for table in seq.tables],
            seed=seq.seed,
            slot=seq.slot,
            regime=seq.regime,
            mu=seq.mu,
        )

    def _allocate(self, plan: StepPlan, seq: Sequence, end: int) -> bool:
        """Take the pages for tokens [computed, end), preempting later sequences if too few are available.

        Sequences that already have a span in this plan are not preempted. Returns False, and takes no page, if too few
        pages are available even so.
        """
        shortage = self.cache.shortage(seq, end)
        while self.cache.pool.available < shortage:
            victim = self.waiting.victim(s for s in reversed(self.running) if s.last_step != plan.number)
            if victim is seq:
                return False  # `seq` keeps its pages and continues when other sequences have finished
            self.preempt(victim)
        granted = self.cache.extend(seq, end)
        if seq.last_step >= 0:  # otherwise the plan's Join contains the pages
            assert seq.row is not None
            plan.grants += [Grant(seq.row, group, index, page) for group, index, page in granted]
        return True

    def _commit_span(
        self, step: int, seq: Sequence, span: Span, tokens: list[int], number: int, result: StepResult
    ) -> Outcome | None:
        """Append the output of span `number` of `step` to `seq`. Return None if the reader receives nothing."""
        if span.scores and seq.scoring:
            seq.score(span.start, result.prompt_logprobs[number])
        if seq.pooling is not None:
            seq.pooling.add(span.start, span.start + span.count, result.pooled.get(number))
        if seq.routing is not None:
            seq.routing.add(span.start, result.routed[number])
        if tokens:
            seq.mu = result.mu.get(number, seq.mu)
            appended = self._append(seq, tokens, step)
            logprobs = result.logprobs[number][:appended] if number in result.logprobs else []
            outcome = Outcome(seq, tokens if appended == len(tokens) else tokens[:appended], logprobs, seq.finish)
        elif seq.complete:
            pooled = None if seq.pooling is None else seq.pooling.result
            self.remove(seq, FinishReason.LENGTH if pooled is None else FinishReason.STOP)
            outcome = Outcome(seq, [], [], seq.finish, pooled=pooled)
        else:
            return None
        if seq.generated == len(outcome.tokens):
            outcome.prompt_computed = seq.prompt_tokens - (seq.prompt_cached or 0)
        if seq.prompt_logprobs:
            outcome.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
        return outcome

    def _append(self, seq: Sequence, tokens: list[int], step: int) -> int:
        """Append the tokens that `step` sampled, up to the first token that ends the sequence; return their number."""
        known, before, finish = seq.tokens, len(seq.tokens), None
        for token in tokens:
            known.append(token)
            if token in seq.end_ids and seq.generated > seq.min_tokens:
                finish = FinishReason.STOP
                break
            if len(known) >= seq.limit:
                finish = FinishReason.LENGTH
                break
        appended = len(known) - before
        if appended > 1 or seq.last_step > step:  # the tokens were unknown when the last step was planned
            self.cache.index_pages(seq, seq.last_step)
        if finish is not None:
            self.remove(seq, finish)
        return appended

    def _fail(self, seq: Sequence, failure: Exception) -> Outcome:
        """End a sequence with an error, even if it has just finished for another reason.

        Its pages are removed from the prefix index.
        """
        self.cache.unindex(seq)
        self.remove(seq, FinishReason.ERROR, failure)
        seq.finish, seq.failure = FinishReason.ERROR, failure
        return Outcome(seq, [], [], FinishReason.ERROR)

    # Moves between the queues

    def _requeue(self, seq: Sequence) -> None:
        """Send a running sequence back to its old place in the queue, to be recomputed."""
        self._release(seq)
        self.waiting.add(seq)

    def _dequeue(self, seq: Sequence) -> None:
        """Remove a sequence from `running`, `waiting` or hold, and release its share of every resource."""
        if seq.row is not None:
            self._release(seq)
        elif seq in self._held:
            self._held.remove(seq)
        else:
            self.waiting.remove(seq)

    def _release(self, seq: Sequence) -> None:
        """Remove a sequence from `running`, and release its share of every resource."""
        self.running.remove(seq)
        self.waiting.stop(seq)
        for resource in self.resources:
            resource.release(seq)
        seq.last_step = -1
