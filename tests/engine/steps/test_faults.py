"""An error at any named point of a step fails the request at fault and no other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from infd.request import FinishReason, SamplingParams
from infd.runner.rows import Rows
from infd.runner.runner import Runner
from tests.engine.driving import ask, serving
from tests.fakes import Seated
from tests.runner.driving import config, executor, request
from tests.runner.fake_model import FakeModel, continuation

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.engine.engine import Engine
    from infd.executors.local import LocalExecutor
    from infd.request import Request
    from infd.scheduler.plan import StepResult

POISON = 97  # a token of one prompt, and of no answer
PROMPTS = [[i, i + 1, POISON if i == 3 else 7, *range(i)] for i in range(1, 9)]
NEW = 4
# The points on the device: where each is, and whose tokens it works for. "copy" is the way of results to the host.
POINTS: dict[str, tuple[type, str, Callable[[Seated, Any], list[list[int]]]]] = {
    "stage": (Rows, "stage", lambda _, joins: [join.tokens for join in joins]),
    "forward": (Runner, "forward", lambda seated, plan: seated.of(plan)),
    "sample": (Runner, "sample", lambda seated, forwarded: seated.of(forwarded.plan)),
    "copy": (Runner, "read", lambda seated, pending: seated.of(pending.plan)),
}
FAULTS = [RuntimeError("the kernel said no"), MemoryError("no room")]

Answer = tuple[list[int], FinishReason | None]


def right(prompt: list[int]) -> Answer:
    return continuation(prompt, NEW), FinishReason.LENGTH


EVERY_ANSWER = [right(prompt) for prompt in PROMPTS]
BUT_ONE = [([], FinishReason.ERROR) if POISON in prompt else right(prompt) for prompt in PROMPTS]


def device(depth: int = 1) -> LocalExecutor:
    return executor(FakeModel(), config(rows=8, step_tokens=32, depth=depth))


def wanted(prompt: list[int]) -> Request:
    return request(prompt, SamplingParams(max_tokens=NEW, temperature=0.0, logprobs=1), scored=1)


async def answers(engine: Engine) -> list[Answer]:
    return [answer[0] for answer in await asyncio.gather(*(ask(engine, wanted(prompt)) for prompt in PROMPTS))]


def inject(monkeypatch: pytest.MonkeyPatch, point: str, fault: Callable[[list[list[int]]], None]) -> None:
    """Call `fault` with the sequences of each step at a point; its errors are raised there."""
    owner, name, tokens = POINTS[point]
    sound, seated = getattr(owner, name), Seated()

    def faulty(self: Any, work: Any, *rest: Any) -> Any:
        fault(tokens(seated, work))
        return sound(self, work, *rest)

    monkeypatch.setattr(owner, name, faulty)


@pytest.mark.parametrize("error", FAULTS, ids=["error", "memory"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("point", POINTS)
async def test_a_request_that_fails_the_device_fails_alone(
    point: str, depth: int, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def poisoned(known: list[list[int]]) -> None:
        if any(POISON in tokens for tokens in known):
            raise error

    inject(monkeypatch, point, poisoned)
    async with serving(device(depth)) as engine:
        assert await answers(engine) == BUT_ONE
        assert await answers(engine) == BUT_ONE, "it serves on, and what was cached meanwhile is sound"


@pytest.mark.parametrize("error", FAULTS, ids=["error", "memory"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_transient_fault_changes_no_answer(point: str, error: Exception, monkeypatch: pytest.MonkeyPatch):
    calls = 0

    def seldom(known: list[list[int]]) -> None:
        nonlocal calls
        if len(known) > 1:
            calls += 1
            if calls % 3 == 1:
                raise error

    inject(monkeypatch, point, seldom)
    async with serving(device(depth=2)) as engine:
        assert await answers(engine) == EVERY_ANSWER
    assert calls > 1, "and it had its chances"


def wrong_logprobs(result: StepResult, number: int) -> None:
    if number in result.logprobs:
        result.logprobs[number] = None  # type: ignore[assignment]


def no_prompt_logprobs(result: StepResult, number: int) -> None:
    result.prompt_logprobs.pop(number, None)


@pytest.mark.parametrize("spoil", [wrong_logprobs, no_prompt_logprobs])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_request_whose_results_cannot_be_committed_fails_alone(
    depth: int,
    spoil: Callable[[StepResult, int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    read, seated = Runner.read, Seated()

    def spoiled(self: Runner, pending: Any) -> StepResult:
        result = read(self, pending)
        for number, tokens in enumerate(seated.of(pending.plan)):
            if POISON in tokens:
                spoil(result, number)
        return result

    monkeypatch.setattr(Runner, "read", spoiled)
    async with serving(device(depth)) as engine:
        assert await answers(engine) == BUT_ONE
        assert await answers(engine) == BUT_ONE

    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == 2, "once for each request that failed"


class Refusing:
    """A watcher that takes no token."""

    def feed(self, token_ids: list[int]) -> int | None:
        raise ValueError("broken")


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_reader_whose_tokens_cannot_be_pushed_fails_alone(depth: int):
    async with serving(device(depth)) as engine, engine.admit(len(PROMPTS), 0) as ticket:
        watchers = [Refusing() if POISON in prompt else None for prompt in PROMPTS]
        choices = await ticket.submit(*map(wanted, PROMPTS), watchers=watchers)
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        ends: list[FinishReason | None] = [None] * len(PROMPTS)
        async for index, delta in choices:
            tokens[index] += delta.token_ids
            ends[index] = delta.finish

    assert list(zip(tokens, ends, strict=True)) == BUT_ONE
