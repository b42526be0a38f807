"""Steps issued ahead of drafts change no answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from infd.config import Config, LiveConfig
from infd.engine.engine import Engine
from infd.request import FinishReason, Generate, Request, SamplingParams, pick
from infd.telemetry.metrics import Metrics
from tests.drafters import Guesses, Oracle
from tests.engine.driving import ask, nothing_is_left, running
from tests.engine.fake_grammars import Counted, FakeGrammars, constrained
from tests.fakes import FakeExecutor, capacity, continuation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.drafting.drafter import Drafter
    from infd.scheduler.plan import StepPlan
    from tests.fakes import FakeStep

STEP_S = 1e-3  # of so short steps drafts that are rarely right gain less than steps issued ahead
LIMITS = replace(
    capacity(pages=256, rows=6, step_tokens=32, max_model_len=256), row_costs=((1, STEP_S), (8, STEP_S), (64, 8e-3))
)


class Stretches(Guesses):
    """Guesses only between tokens 40 and 60 of a choice, and between 120 and 130."""

    def drafter(self, request: Request, root: bytes) -> Drafter:
        return Now(super().drafter(request, root))


class Now:
    sure = False
    run = 0

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        known = len(tokens)
        return self._oracle.draft(tokens, most) if 40 <= known < 60 or 120 <= known < 130 else []

    def finish(self, tokens: Sequence[int]) -> None:
        """No-op."""


class Watched(FakeExecutor):
    """Notes which steps are issued while another is in flight."""

    def __init__(self) -> None:
        super().__init__(LIMITS, decoding_depth=2, step_s=STEP_S)
        self.engine: Engine | None = None
        self.ahead: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> FakeStep:
        assert self.engine is not None
        if self.engine.core.loop.in_flight:
            self.ahead.append(plan)
        return super().forward(plan)

    @property
    def drafts(self) -> int:
        return sum(len(step.plan.drafts) for step in self.issued)


def made(executor: Watched, drafting: Guesses) -> Engine:
    executor.engine = Engine(LiveConfig(Config()), executor, Metrics(), grammars=FakeGrammars(), drafting=drafting)
    return executor.engine


def request(prompt: list[int], max_tokens: int, constraint: Counted | None = None, *, ends: bool = False) -> Request:
    answer = continuation(prompt, max_tokens)
    generate = Generate(SamplingParams(max_tokens=max_tokens), frozenset(answer[-1:]) if ends else frozenset())
    return Request(id="r", prompt=tuple(prompt), wants=(generate,), constraint=constraint)


def expected(request: Request) -> tuple[list[int], FinishReason]:
    generate, prompt = pick(Generate, request.wants), list(request.prompt)
    assert generate is not None
    if request.constraint is not None:
        return constrained(prompt, request.constraint), FinishReason.STOP  # type: ignore[arg-type]
    answer = continuation(prompt, generate.sampling.max_tokens)
    end = next((at for at, token in enumerate(answer) if token in generate.end_ids), None)
    return (answer, FinishReason.LENGTH) if end is None else (answer[: end + 1], FinishReason.STOP)


def asked(count: int) -> list[Request]:
    """Return requests that end in every way: by length, by an end id, by their grammar."""
    some = [request([n, 5, 9], 130 + n, ends=n % 2 == 0) for n in range(count)]
    return [*some, *(request([n, 8], 60, Counted(2 + n, 50 + n)) for n in range(count // 2))]


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("wrong", [0.0, 0.5])
async def test_answers_with_drafts_that_come_and_go_are_those_without_drafts(at_once: int, wrong: float):
    executor = Watched()
    engine = made(executor, Stretches(wrong=wrong, tokens=140))
    requests = asked(6)
    async with running(engine):
        for first in range(0, len(requests), at_once):
            some = requests[first : first + at_once]
            answers = await asyncio.gather(*(ask(engine, each) for each in some))
            assert answers == [{0: expected(each)} for each in some]
    nothing_is_left(engine)
    assert executor.drafts > 5
    assert len(executor.ahead) > 50
    assert not any(plan.drafts for plan in executor.ahead)


async def test_preempted_held_and_aborted_requests_change_no_answer_of_others():
    executor = Watched()
    engine = made(executor, Stretches(wrong=0.2, tokens=140))
    requests = asked(8)

    async def disturb() -> None:
        """Preempt, hold and resume sequences in turn, between steps in flight."""
        for turn in range(400):
            await asyncio.sleep(0)
            scheduler = engine.core.scheduler
            if not scheduler.running:
                continue
            seq = scheduler.running[turn % len(scheduler.running)]
            if turn % 3 == 0:
                scheduler.preempt(seq)
            elif turn % 3 == 1:
                scheduler.hold(seq)
                await asyncio.sleep(0)
                scheduler.resume(seq)
            engine.core.loop.wake()

    async def leave(each: Request) -> None:
        async with engine.admit(1, 0) as ticket:
            choices = await ticket.submit(each)
            async for _, delta in choices:
                if delta.token_ids:
                    return

    async with running(engine):
        disturbing = asyncio.create_task(disturb())
        answers, *_ = await asyncio.gather(
            asyncio.gather(*(ask(engine, each) for each in requests)),
            *(leave(request([n, 3], 100)) for n in range(4)),
        )
        disturbing.cancel()
    assert answers == [{0: expected(each)} for each in requests]
    nothing_is_left(engine)
    assert executor.drafts
    assert executor.ahead


async def test_what_a_step_cost_is_learned_once_the_next_one_is_issued():
    executor = Watched()
    engine = made(executor, Guesses(tokens=140))
    async with running(engine):
        speculation, learned = engine.core.scheduler.speculation, []
        took = speculation.took

        def noted(plan: StepPlan, seconds: float, *, masked: bool, late: bool) -> None:
            learned.append((plan.number, executor.issued[-1].plan.number))
            took(plan, seconds, masked=masked, late=late)

        speculation.took = noted  # type: ignore[assignment, method-assign]
        await ask(engine, request([3, 5, 9], 60))
    assert [number for number, _ in learned] == [step.plan.number for step in executor.issued]
    assert all(issued > number for number, issued in learned[:-1])
