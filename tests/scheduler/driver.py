"""Drives a Scheduler against the fake device, with any number of steps in flight."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

import msgspec

from infd.drafting.drafter import NO_DRAFTS
from infd.errors import Fault, RequestFailed
from infd.request import FinishReason, Generate, Pool, Request, Route, SamplingParams, Score, Want, pick
from infd.scheduler.scheduler import Scheduler
from infd.scheduler.sequence import Sequence
from tests.fakes import FULL, FakeDevice, capacity, continuation, pooled, prompt_likelihoods, routed

if TYPE_CHECKING:
    from infd.drafting.drafter import Drafter
    from infd.request import Adapter, Pooled, TokenLogprobs
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan, StepResult
    from infd.scheduler.scheduler import Scheduled


T = TypeVar("T")
NOT_FINITE = Fault.of(RequestFailed("not finite"))


def sequence(
    prompt: int | list[int],
    *,
    max_tokens: int = 4,
    priority: int = 0,
    seed: int = 0,
    root: bytes = b"",
    scored: int | None = None,
    pool: Pool | None = None,
    route: bool = False,
    end_ids: frozenset[int] = frozenset(),
    adapter: Adapter | None = None,
    first: Sequence | None = None,
    drafter: Drafter = NO_DRAFTS,
    tenant: str = "",
    share: float = 1.0,
) -> Sequence:
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    wants: list[Want] = []
    if pool is not None:
        wants.append(pool)
    elif max_tokens:
        wants.append(Generate(SamplingParams(max_tokens=max_tokens, seed=seed), end_ids))
    if scored is not None:
        wants.append(Score(scored))
    if route:
        wants.append(Route())
    request = Request(id="r", prompt=tuple(tokens), wants=tuple(wants), priority=priority, tenant=tenant, share=share)
    return Sequence(request, prefix_root=root + repr(adapter).encode(), adapter=adapter, first=first, drafter=drafter)


class Driver:
    """`issue` plans and starts a step, `complete` commits the oldest one; all invariants are checked after each.

    depth  steps to keep in flight
    ahead  further steps, while the scheduler permits them
    """

    def __init__(
        self,
        limits: Capacity | None = None,
        *,
        depth: int = 1,
        ahead: int = 0,
        patience: int = 4,
        caching: bool = True,
        slots: int = 4,
        per_step: int = 4,
        drafts: int = 0,
    ) -> None:
        self.capacity = limits or capacity()
        self.scheduler = Scheduler(
            self.capacity,
            priority_patience=patience,
            prefix_caching=caching,
            max_adapters=slots,
            max_adapters_per_step=per_step,
            max_drafts=drafts,
        )
        self.per_step = per_step
        self.device = FakeDevice(self.capacity)
        self.depth = depth
        self.ahead = ahead
        self.epoch = 0  # of the prefix cache
        self.in_flight: deque[Scheduled] = deque()
        self.everybody: list[Sequence] = []
        self.scored: dict[Sequence, list[TokenLogprobs]] = {}
        self.pooled: dict[Sequence, Pooled] = {}
        self.steps: list[Scheduled] = []  # all of them
        self.issued_ahead: list[Scheduled] = []  # of these

    @property
    def plans(self) -> list[StepPlan]:
        return [step.plan for step in self.steps]

    def add(self, seq: Sequence) -> Sequence:
        if seq.adapter is not None:
            self.device.adapters.add(seq.adapter)
        self.scheduler.add(seq)
        self.everybody.append(seq)
        return seq

    @property
    def may_issue(self) -> bool:
        """Whether the step loop would issue a step now, if one can be planned."""
        flying = len(self.in_flight)
        return flying < self.depth or (flying < self.depth + self.ahead and self.scheduler.may_plan_ahead)

    def issue(self) -> Scheduled | None:
        ahead = self.ahead > 0 and len(self.in_flight) >= self.depth
        step = self.scheduler.plan(ahead=ahead)
        if step is not None:
            self.steps.append(step)
            self.in_flight.append(step)
            if ahead:
                self.issued_ahead.append(step)
                assert not step.plan.drafts
            assert [span.row for span in step.plan.spans] == [seq.row for seq in step.sequences]
            assert len({seq.adapter for seq in step.sequences} - {None}) <= self.per_step
        self.check()
        return step

    def complete(self, spoilt: int | None = None, failed: int | None = None) -> None:
        """Run the oldest step on the device only now, so that a dropped step's writes are missing.

        spoilt  number of a span whose result cannot be committed, if it has a token
        failed  number of a span that fails alone
        """
        step = self.in_flight.popleft()
        result = carried(self.device.run(carried(step.plan)))
        culprits = []
        if spoilt is not None:
            result.logprobs[spoilt % len(step.sequences)] = None  # type: ignore[assignment]
            culprits.append(step.sequences[spoilt % len(step.sequences)])
        if failed is not None:
            culprits.append(self._fail_one(step, result, failed % len(step.sequences)))
        theirs = [page for seq in culprits for table in seq.tables for page in table] if failed is not None else []
        for outcome in self.scheduler.commit(step, result):
            if outcome.finish is FinishReason.ERROR:
                assert outcome.seq in culprits
            if (first := outcome.seq.first) is not None and pick(Score, first.request.wants) is not None:
                untold = first.finish is None and first.prompt_tokens > 1 and first not in self.scored
                assert not untold, "a choice has news before the scores of its prompt are known"
            if outcome.prompt_logprobs:
                assert outcome.seq not in self.scored, "a prompt was scored twice"
                self.scored[outcome.seq] = outcome.prompt_logprobs
            if outcome.pooled is not None:
                assert outcome.seq not in self.pooled, "a prompt was pooled twice"
                self.pooled[outcome.seq] = outcome.pooled
        assert not any(page in self.scheduler.cache.index for page in theirs), "what a failed sequence held is found"
        self.check()

    def _fail_one(self, step: Scheduled, result: StepResult, number: int) -> Sequence:
        """Have one span fail alone. Return its sequence."""
        if result.accepted[number]:
            before = sum(result.accepted[:number])
            del result.tokens[before : before + result.accepted[number]]
            result.accepted[number] = 0
        result.failed[number] = NOT_FINITE
        return step.sequences[number]

    def fail(self) -> None:
        """All steps in flight fail."""
        self.scheduler.rollback(self.in_flight)
        self.in_flight.clear()
        self.check()

    def forget(self, *, preempting: bool) -> int:
        """Reset the prefix cache. Without a step in flight, unreferenced pages are overwritten on the device."""
        self.epoch += 1

        def root(seq: Sequence) -> bytes:
            return bytes([self.epoch]) + repr(seq.adapter).encode()

        pages = self.scheduler.forget_prefixes(root, preempting=preempting)
        if not self.in_flight:
            held = {page for seq in self.scheduler.running for table in seq.tables for page in table}
            for page, memory in enumerate(self.device.memory):
                if page not in held:
                    memory[:] = [-1] * len(memory)
        self.check()
        return pages

    def check(self) -> None:
        self.scheduler.verify()
        for seq in self.scheduler.running:
            least = min(seq.computed, len(seq.tokens) - 1)  # if no draft in flight is kept
            for group, table in zip(self.capacity.layout.groups, seq.tables, strict=True):
                first = 0 if group.window is None else max(0, least - group.window + 1)
                for position in range(first, seq.computed):
                    assert table[position // group.page_tokens], f"{seq} lost a page that its next token sees"

    def step(self) -> Scheduled | None:
        """Keep as many steps in flight as the step loop would, then commit one."""
        step = None
        while self.may_issue and (step := self.issue()):
            pass
        if self.in_flight:
            self.complete()
        return step

    def finish(self, limit: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running or self.in_flight):
                break
            self.step()
        assert not [*self.scheduler.waiting, *self.scheduler.running], "work is left but nothing moves"
        assert self.scheduler.cache.pool.referenced == 0
        assert not any(seq.in_flight for seq in self.everybody)

    def check_answers(self) -> None:
        """Assert that every finished sequence generated the fake model's tokens."""
        for seq in self.everybody:
            got = seq.tokens[seq.prompt_tokens :]
            prompt, layout = list(seq.request.prompt), self.capacity.layout
            want = continuation(prompt, len(got), seed=seq.seed, layout=layout, adapter=seq.adapter)
            assert got == want, f"{seq}: {got} != {want}"
            self._check_scores(seq)
            self._check_routes(seq)
            if (pool := pick(Pool, seq.request.wants)) is not None:
                assert (seq in self.pooled) == (seq.finish is FinishReason.STOP)
                assert self.pooled.get(seq) in (None, pooled(pool, prompt, self.capacity, seq.adapter))
                continue
            if seq.finish is FinishReason.LENGTH:
                assert len(seq.tokens) == seq.limit
            if seq.finish is FinishReason.STOP:
                assert got[-1] in seq.end_ids

    def _check_scores(self, seq: Sequence) -> None:
        score = pick(Score, seq.request.wants)
        if score is None:
            assert seq not in self.scored
        elif seq in self.scored or seq.finish in (FinishReason.LENGTH, FinishReason.STOP):
            prompt, layout = list(seq.request.prompt), self.capacity.layout
            want = prompt_likelihoods(prompt, score.top, layout=layout, adapter=seq.adapter)
            assert self.scored.get(seq, []) == want

    def _check_routes(self, seq: Sequence) -> None:
        """Assert that the experts of all tokens but the last are known once a sequence has a token."""
        assert (seq.routing is None) == (pick(Route, seq.request.wants) is None)
        if seq.routing is not None and seq.generated:
            reported = seq.routing.report(seq.generated)
            assert reported is not None
            layout = self.capacity.layout
            assert reported.values == routed(seq.tokens[:-1], seq.prompt_tokens, layout=layout, adapter=seq.adapter)


def carried(message: T) -> T:
    """Return a plan or a result as another process would receive it."""
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert there == message
    return there


def granted(step: Scheduled | None) -> dict[Sequence, int]:
    assert step is not None
    return {seq: span.count for seq, span in zip(step.sequences, step.plan.spans, strict=True)}


__all__ = ["FULL", "NOT_FINITE", "Driver", "granted", "sequence"]
