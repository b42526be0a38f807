"""Random histories of the scheduler leak nothing and change no answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from infd.drafting.drafter import NO_DRAFTS
from infd.request import Adapter, FinishReason, Pool
from infd.scheduler.layout import CacheLayout, PageGroup, Regimes
from infd.scheduler.token_budget import MANY_STARTING
from tests.drafters import Oracle
from tests.fakes import FULL, capacity, continuation
from tests.scheduler.driver import Driver, sequence

if TYPE_CHECKING:
    from infd.request import PoolTask

LAYOUTS = {
    "full": FULL,
    "window": CacheLayout((PageGroup(layers=(0,), page_tokens=4, window=6),)),
    "full and window": CacheLayout(
        (PageGroup(layers=(0,), page_tokens=2), PageGroup(layers=(1,), page_tokens=4, window=7)),
    ),
    "outgrown": CacheLayout((PageGroup(layers=(0,), page_tokens=2),), regimes=Regimes(outgrown=9)),
    "outgrown, window": CacheLayout(
        (PageGroup(layers=(0,), page_tokens=2), PageGroup(layers=(1,), page_tokens=4, window=7)),
        regimes=Regimes(outgrown=11),
    ),
    "by prompt": CacheLayout((PageGroup(layers=(0,), page_tokens=4),), regimes=Regimes(prompt_over=7)),
    "nothing kept": CacheLayout((), divisible=False),
}


class Histories(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        depth=st.integers(1, 3),
        ahead=st.integers(0, 2),
        rows=st.integers(1, 5) | st.integers(MANY_STARTING + 2, MANY_STARTING + 4),
        spare=st.integers(0, 12),
        step_tokens=st.integers(2, 12),
        mixed_tokens=st.none() | st.integers(1, 12),
        crowded_tokens=st.none() | st.integers(1, 12),
        caching=st.booleans(),
        score_cost=st.integers(1, 4),
        slots=st.integers(1, 3),
        per_step=st.integers(1, 3),
        drafts=st.integers(0, 4),
        step_s=st.sampled_from([1.0, 2e-3, 1e-3]),  # of short steps less is lost without drafts than by waiting
        pools_last=st.booleans(),
    )
    def start(
        self,
        layout: str,
        depth: int,
        ahead: int,
        rows: int,
        spare: int,
        step_tokens: int,
        mixed_tokens: int | None,
        crowded_tokens: int | None,
        caching: bool,
        score_cost: int,
        slots: int,
        per_step: int,
        drafts: int,
        step_s: float,
        pools_last: bool,
    ) -> None:
        chosen = LAYOUTS[layout]
        longest = 24
        self.encoder = not chosen.groups
        limits = capacity(
            chosen,
            pages=chosen.peak_pages(longest, step_tokens) + spare if chosen.groups else 0,
            rows=rows,
            step_tokens=longest if self.encoder else max(step_tokens, rows),
            max_model_len=longest,
            mixed_tokens=mixed_tokens,
            crowded_tokens=crowded_tokens,
            score_cost=1 if self.encoder else score_cost,
            pools_last=pools_last,
        )
        self.driver = Driver(
            replace(limits, row_costs=((1, step_s), (8, step_s))),
            depth=depth,
            ahead=ahead,
            patience=3,
            caching=caching,
            slots=slots,
            per_step=per_step,
            drafts=drafts,
        )
        self.adapters = [Adapter("a", n) for n in range(1, 6)]
        self.ended: list[object] = []

    @rule(
        # Few distinct tokens, so that prefixes are often shared.
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-2, 2),
        seed=st.integers(0, 2),
        choices=st.integers(1, 3),
        stop_after=st.none() | st.integers(1, 6),
        scored=st.none() | st.integers(0, 2),
        only_scored=st.booleans(),
        route=st.booleans(),
        adapter=st.none() | st.integers(0, 4),
        steps_apart=st.booleans(),
        wrong=st.none() | st.sampled_from([0.0, 0.3, 1.0]),
        tenant=st.sampled_from(["a", "a", "b", "c"]),
        share=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        seed: int,
        choices: int,
        stop_after: int | None,
        scored: int | None,
        only_scored: bool,
        route: bool,
        adapter: int | None,
        steps_apart: bool,
        wrong: float | None,
        tenant: str,
        share: float,
    ) -> None:
        """Add choices together, or one per step: a later step then needs an adapter that an earlier step loads."""
        layout = self.driver.capacity.layout
        chosen = None if adapter is None else self.adapters[adapter]
        if self.encoder:
            max_tokens = 1
        if scored is not None and only_scored and len(prompt) > 1:
            max_tokens, choices = 0, 1
        stop: list[int] = []
        if stop_after is not None:
            stop = continuation(prompt, stop_after, seed=seed, layout=layout, adapter=chosen)[-1:]
        first = None
        drafting = {"layout": layout, "adapter": chosen, "wrong": wrong, "short": True}
        for choice in range(choices):
            seq = sequence(
                prompt,
                max_tokens=max_tokens,
                priority=priority,
                seed=seed + choice,
                scored=None if choice else scored,
                route=route and not self.encoder,
                end_ids=frozenset(stop),
                adapter=chosen,
                first=first,
                tenant=tenant,
                share=share,
                drafter=NO_DRAFTS if wrong is None else Oracle.of(prompt, 12, seed=seed + choice, **drafting),
            )
            first = first or seq
            self.driver.add(seq)
            if steps_apart and self.driver.may_issue:
                self.driver.issue()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        task=st.sampled_from(["embed", "token_embed"]),
        skip=st.integers(0, 5),
        priority=st.integers(-2, 2),
        adapter=st.none() | st.integers(0, 4),
    )
    def arrive_to_pool(self, prompt: list[int], task: PoolTask, skip: int, priority: int, adapter: int | None) -> None:
        pool = Pool(task, skip=min(skip, len(prompt) - 1))
        chosen = None if adapter is None else self.adapters[adapter]
        self.driver.add(sequence(prompt, pool=pool, priority=priority, adapter=chosen))

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        alive = [*self.driver.scheduler.waiting, *self.driver.scheduler.running]
        if alive:
            self.driver.scheduler.remove(alive[which % len(alive)], FinishReason.ABORT)

    @rule(which=st.integers(0, 100))
    def hold(self, which: int) -> None:
        """A reader has fallen behind with all choices of a prompt."""
        alive = [seq for seq in self.driver.everybody if seq.finish is None]
        if alive:
            held = alive[which % len(alive)]
            for seq in alive:
                if (seq.first or seq) is (held.first or held):
                    self.driver.scheduler.hold(seq)

    @rule()
    def resume(self) -> None:
        for seq in self.driver.everybody:
            self.driver.scheduler.resume(seq)

    @rule(preempting=st.booleans())
    def forget(self, preempting: bool) -> None:
        self.driver.forget(preempting=preempting)

    @rule(which=st.integers(0, 4))
    def unload(self, which: int) -> None:
        adapter = self.adapters[which]
        if adapter not in [seq.adapter for seq in self.driver.everybody if seq.finish is None]:
            slot = self.driver.scheduler.adapters.drop(adapter)
            if slot is not None and not self.driver.in_flight:
                del self.driver.device.slots[slot]
                self.driver.device.adapters.discard(adapter)
            self.adapters[which] = Adapter("a", adapter.generation + 5)

    @precondition(lambda self: self.driver.may_issue)
    @rule()
    def issue(self) -> None:
        self.driver.issue()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def complete(self) -> None:
        self.driver.complete()

    @precondition(lambda self: self.driver.in_flight)
    @rule(which=st.integers(0, 10))
    def complete_but_for_one(self, which: int) -> None:
        self.driver.complete(spoilt=which)

    @precondition(lambda self: self.driver.in_flight)
    @rule(which=st.integers(0, 10))
    def complete_and_fail_one(self, which: int) -> None:
        self.driver.complete(failed=which)

    @precondition(lambda self: self.driver.in_flight)
    @rule(full=st.booleans())
    def fail(self, full: bool) -> None:
        while full and self.driver.may_issue and self.driver.issue():
            pass
        self.driver.fail()

    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.verify()
            alive = sum(seq.finish is None for seq in self.driver.everybody)
            scheduler = self.driver.scheduler
            held = sum(map(scheduler.holds, self.driver.everybody))
            assert alive == len(scheduler.waiting) + len(scheduler.running) + held

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.resume()
            self.driver.finish()
            self.driver.check_answers()


Histories.TestCase.settings = settings(
    max_examples=int(os.environ.get("INFD_TEST_HISTORIES", "150")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHistories = pytest.mark.timeout(1800)(pytest.mark.histories(Histories.TestCase))
