"""Random histories of an engine's lifecycle: concurrent operators and clients get every answer, and get it right."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infd.config import Config, LiveConfig, SchedulerConfig, ServerConfig
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.engine.streams import stream
from infd.errors import CheckpointError, InfdError, RequestError
from infd.memory import ALL, MemoryPart, Residency
from infd.request import FinishReason, Generate, Score, pick
from infd.telemetry.metrics import Metrics
from tests.engine.driving import request
from tests.fakes import FakeExecutor, capacity, continuation, likeliness, prompt_likelihoods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.engine.lifecycle.target import Transition
    from infd.request import Request, TokenLogprobs

MODES = st.sampled_from(["abort", "wait", "keep"])
PATIENCE = 20_000  # turns of the loop; only a history that fails takes as many


class Histories(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 3),
        wakes=st.booleans(),
        pages=st.sampled_from([20, 64]),
        score_cost=st.integers(1, 3),
        pending_bytes=st.sampled_from([200, 2000, stream.PENDING_BYTES]),
    )
    def start(self, depth: int, wakes: bool, pages: int, score_cost: int, pending_bytes: int) -> None:
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(stream, "PENDING_BYTES", pending_bytes)  # so that slow readers are waited for
        self.loop = asyncio.new_event_loop()
        room = capacity(pages=pages, rows=4, step_tokens=16, score_cost=score_cost)
        self.executor = FakeExecutor(room, depth=depth)
        config = Config(server=ServerConfig(wake_on_request=wakes), scheduler=SchedulerConfig(max_waiting=12))
        self.engine = Engine(LiveConfig(config), self.executor, Metrics())
        self.clients: list[asyncio.Task[Any]] = []
        self.transitions: list[Transition] = []
        self.drained = False
        self.run(self.engine.load())
        self.running = self.loop.create_task(self.engine.run())
        self.turns(3)

    def run(self, what: Any) -> Any:
        return self.loop.run_until_complete(what)

    def turns(self, count: int) -> None:
        async def several() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.run(several())

    async def client(self, asked: Request, turns: int) -> None:
        """Send a request, and read the answer at intervals of some turns of the loop."""
        engine = self.engine
        prompt, generate, score = list(asked.prompt), pick(Generate, asked.wants), pick(Score, asked.wants)
        assert generate is not None
        tokens: dict[int, list[int]] = {index: [] for index in range(asked.choices)}
        finish: dict[int, FinishReason | None] = {}
        scores: Sequence[TokenLogprobs] | None = None
        async with engine.admit(asked.choices, 0) as ticket:
            assert engine.lifecycle.state is State.READY, "admitted at rest"
            async for index, delta in await ticket.submit(asked):
                if scores is None:
                    assert index == 0, "a choice has news before the first one, which brings the prompt's scores"
                    scores = delta.prompt_logprobs
                assert finish.get(index) is None, "something came after the terminal event"
                tokens[index] += delta.token_ids
                told = [] if generate.sampling.logprobs is None else list(map(likeliness, delta.token_ids))
                assert [each.chosen for each in delta.logprobs] == told
                finish[index] = delta.finish
                for _ in range(turns):
                    await asyncio.sleep(0)
        if any(tokens.values()):
            assert list(scores or ()) == ([] if score is None else prompt_likelihoods(prompt, score.top))
        for index, got in tokens.items():
            want = continuation(prompt, generate.sampling.max_tokens, seed=index)
            if finish[index] is FinishReason.LENGTH:
                assert got == want
            else:
                assert finish[index] is FinishReason.ABORT or self.drained
                assert got == want[: len(got)]

    def operate(self, verb: Callable[[], Transition]) -> None:
        async def within() -> None:
            with contextlib.suppress(InfdError):
                self.transitions.append(verb())

        self.run(within())

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        count=st.integers(1, 30),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        scored=st.none() | st.integers(0, 2),
        turns=st.sampled_from([0, 0, 0, 5, 50]),
    )
    def arrive(self, prompt: list[int], count: int, choices: int, scored: int | None, turns: int) -> None:
        asked = request(prompt, count, choices=choices, logprobs=scored, prompt_logprobs=scored)
        self.clients.append(self.loop.create_task(self.client(asked, turns)))

    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        if self.clients:
            self.clients[which % len(self.clients)].cancel()

    @rule(mode=MODES, new=st.sampled_from(["hold", "reject"]))
    def pause(self, mode: Any, new: Any) -> None:
        self.operate(lambda: self.engine.control.pause(mode, new))

    @rule(mode=MODES, level=st.integers(1, 2), by_itself=st.booleans())
    def sleep(self, mode: Any, level: int, by_itself: bool) -> None:
        self.operate(lambda: self.engine.control.sleep(mode, level, by_itself=by_itself))

    @rule(
        parts=st.sampled_from([ALL, ALL, frozenset({MemoryPart.WEIGHTS}), frozenset({MemoryPart.CACHE})]),
        ready=st.booleans(),
    )
    def rouse(self, parts: frozenset[MemoryPart], ready: bool) -> None:
        self.operate(lambda: (self.engine.control.resume if ready else self.engine.control.wake)(parts))

    @rule(how=st.sampled_from(["well", "refused", "midway"]))
    def load_weights(self, how: str) -> None:
        self.executor.weights_error = None if how == "well" else CheckpointError(how)
        self.executor.fails_midway = how == "midway"
        self.operate(lambda: self.engine.control.load_weights("/other"))

    @rule(preempting=st.booleans())
    def forget(self, preempting: bool) -> None:
        self.engine.core.forget_prefixes(preempting=preempting)

    @rule(fails=st.booleans())
    def wakes_badly(self, fails: bool) -> None:
        self.executor.wake_error = CheckpointError("gone") if fails else None

    @rule(open=st.booleans())
    def memory_takes_its_time(self, open: bool) -> None:
        (self.executor.memory_gate.set if open else self.executor.memory_gate.clear)()

    @rule(count=st.integers(1, 40))
    def go_on(self, count: int) -> None:
        self.turns(count)

    @precondition(lambda self: not self.drained)
    @rule(seldom=st.integers(0, 15))
    def drain(self, seldom: int) -> None:
        if not seldom:
            self.drained = True
            self.loop.create_task(self.engine.drain(60)).add_done_callback(lambda task: task.result())

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "engine"):
            engine = self.engine
            engine.core.scheduler.verify()
            assert engine.core.in_flight.accepted == sum(engine.status().terminal.values()) + len(engine.core.in_flight)
            assert not self.running.done()
            if engine.lifecycle.state is State.READY:
                assert self.executor.memory.whole
            if self.executor.device.asleep:
                assert not engine.core.loop.in_flight

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.end()
            finally:
                self.patches.undo()

    def end(self) -> None:
        self.executor.wake_error = self.executor.weights_error = None
        self.executor.memory_gate.set()
        self.run(self.recover())
        for task in self.clients:
            with contextlib.suppress(RequestError, asyncio.CancelledError):
                task.result()
        status = self.engine.status()
        assert status.pages_referenced == status.tickets == status.waiting == status.held == status.waiting_tokens == 0
        assert all(transition.ended.done() for transition in self.transitions)
        assert all(
            transition.error is None or isinstance(transition.error, InfdError) for transition in self.transitions
        )
        self.run(self.engine.close())
        self.run(asyncio.gather(self.running, return_exceptions=True))
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()

    async def recover(self) -> None:
        """Return the engine to readiness as an operator would; then every request must be answered."""
        rest = self.engine.control
        if not self.drained:
            with contextlib.suppress(InfdError):
                await rest.resume().result()
            if self.executor.memory.weights is Residency.INVALID:
                await rest.load_weights("/other").result()
            await rest.resume().result()
            assert self.engine.lifecycle.state is State.READY
        for _ in range(PATIENCE):
            if all(task.done() for task in self.clients) and not len(self.engine.admission):
                return
            await asyncio.sleep(0)
        raise AssertionError("somebody is never answered")


Histories.TestCase.settings = settings(
    max_examples=int(os.environ.get("INFD_TEST_HISTORIES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHistories = pytest.mark.timeout(1800)(pytest.mark.histories(Histories.TestCase))
