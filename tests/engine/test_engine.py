from __future__ import annotations

import asyncio
import math
import random
import time
from typing import TYPE_CHECKING

import pytest

from infd.config import Config, LiveConfig
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.engine.steps.watchdog import PATIENCE_S
from infd.engine.streams import fanout
from infd.engine.streams.stream import LOGPROB_BYTES, PENDING_BYTES, TOKEN_BYTES, TOP_LOGPROB_BYTES
from infd.errors import (
    Aborted,
    DeviceLost,
    InvalidRequest,
    NotReady,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    StepTooLarge,
)
from infd.request import FinishReason
from infd.telemetry.metrics import Metrics
from tests.engine.driving import ask, collect, request, serving
from tests.fakes import FakeExecutor, FakeStep, Seated, capacity, continuation, prompt_likelihoods

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.request import TokenLogprobs
    from infd.scheduler.plan import StepPlan

POISON = 499


async def test_a_step_issued_ahead_is_not_counted_as_taking_the_time_of_the_step_before():
    began = time.perf_counter()
    async with serving(FakeExecutor(depth=2, step_s=0.02)) as engine:
        await ask(engine, request([1, 2], 8))
        took = engine.metrics.step
    assert sum(took.counts) == 8
    assert took.sum < time.perf_counter() - began


@pytest.mark.parametrize("rows", [1, 2])
async def test_steps_are_issued_ahead_while_all_requests_decode_and_none_waits(rows: int):
    flying: list[tuple[int, int]] = []

    def begun(plan: StepPlan) -> None:
        flying.append((plan.tokens, engine.core.loop.in_flight))

    limits = capacity(pages=256, rows=rows, step_tokens=8, max_model_len=256)
    async with serving(FakeExecutor(limits, decoding_depth=2, step_s=1e-3, fault=begun)) as engine:
        asked = (ask(engine, request([1] * 20, 4)), ask(engine, request([2] * 20, 4)))
        if rows == 1:
            await asyncio.gather(*asked)  # the second waits for the first one's row
            assert flying == [(8, 1), (8, 1), (4, 1), *[(1, 1)] * 3, (8, 1), (8, 1), (4, 2), *[(1, 2)] * 2, (1, 1)]
        else:
            await asked[0]
            assert flying == [(8, 1), (8, 1), (4, 2), (1, 2), (1, 2), (1, 1)]
            await asked[1]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_many_streams_at_once_are_each_complete_and_correct(depth: int):
    async with serving(FakeExecutor(depth=depth)) as engine:
        prompts = [[i, i + 1, *range(i % 7)] for i in range(64)]
        answers = await asyncio.gather(*(ask(engine, request(prompt, 3 + prompt[0] % 9)) for prompt in prompts))

    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == {0: (continuation(prompt, 3 + prompt[0] % 9), FinishReason.LENGTH)}


async def test_each_choice_has_noise_of_its_own_and_an_index_in_order():
    async with serving() as engine:
        answer = await ask(engine, request([1] * 40, choices=3, seed=7), request([2, 3], choices=2))

    assert {i: tokens for i, (tokens, _) in answer.items()} == {
        **{i: continuation([1] * 40, 5, seed=7 + i) for i in range(3)},
        **{3 + i: continuation([2, 3], 5, seed=i) for i in range(2)},
    }


async def test_leaving_the_block_ends_the_work_and_frees_its_pages():
    async with serving() as engine:
        async with engine.admit(1, 0) as ticket:
            choices = await ticket.submit(request([1, 2, 3], 200))
            await anext(choices)
            assert engine.status().pages_referenced > 0
        assert engine.status().pages_referenced == 0
        assert engine.status().terminal["disconnect"] == 1


async def test_a_ticket_counts_prompts_once_and_tokens_as_they_are_handed_over():
    async with serving() as engine:
        await ask(engine, request([1] * 9, 1))
        async with engine.admit(3, 0) as ticket:
            choices = await ticket.submit(request([1] * 9, 4, choices=2), request([2], 3))
            await collect(choices)
            assert (ticket.prompt_tokens, ticket.cached_tokens, ticket.generated_tokens) == (10, 8, 11)


async def test_a_reader_that_lags_finds_its_tokens_merged():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        choices = await ticket.submit(request([1, 2], 20))
        while engine.status().terminal["length"] == 0:
            await asyncio.sleep(0)
        deltas = [delta async for _, delta in choices]

    assert [(delta.token_ids, delta.finish) for delta in deltas] == [(continuation([1, 2], 20), FinishReason.LENGTH)]


async def test_a_slow_readers_sequence_is_held_until_the_reader_catches_up():
    limits = capacity(pages=512, rows=16, step_tokens=64, max_model_len=1024)
    got: list[list[int]] = [[], []]
    async with serving(FakeExecutor(limits, depth=2)) as engine, engine.admit(2, 0) as ticket:
        choices = await ticket.submit(request([1, 2], 500, choices=2, logprobs=20))
        for _ in range(3):
            await ask(engine, request([3], 200))  # tokens in flight for the slow reader still arrive
            handed_over = ticket.generated_tokens
            assert await ask(engine, request([3], 200)) == {0: (continuation([3], 200), FinishReason.LENGTH)}
            assert (ticket.generated_tokens, engine.status().pages_referenced) == (handed_over, 0)
            assert PENDING_BYTES < choices.streams[0].inbox.pending_bytes < 1.2 * PENDING_BYTES
            while choices.ready:
                index, delta = choices.take()
                got[index] += delta.token_ids
        async for index, delta in choices:
            got[index] += delta.token_ids

    assert got == [continuation([1, 2], 500, seed=seed) for seed in range(2)]


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_paused_reader_of_many_choices_has_no_more_unread_than_the_limit_and_the_steps_in_flight(
    depth: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fanout, "BUDGET_S", math.inf)
    limits = capacity(pages=512, rows=64, step_tokens=128, max_model_len=64)
    a_step = 64 * (TOKEN_BYTES + LOGPROB_BYTES + 20 * TOP_LOGPROB_BYTES)
    async with serving(FakeExecutor(limits, depth=depth)) as engine, engine.admit(64, 0) as ticket:
        choices = await ticket.submit(request([1, 2], 9, choices=64, logprobs=20))
        while not choices.paused or engine.busy:
            await asyncio.sleep(0)
        assert choices.streams[0].inbox.pending_bytes < PENDING_BYTES + depth * a_step
        answers = await collect(choices)

    assert answers == {n: (continuation([1, 2], 9, seed=n), FinishReason.LENGTH) for n in range(64)}


async def test_a_watcher_ends_its_choice_at_the_token_it_names():
    class StopAt:
        def __init__(self, token: int) -> None:
            self.token = token

        def feed(self, token_ids: list[int]) -> int | None:
            return token_ids.index(self.token) + 1 if self.token in token_ids else None

    want = continuation([5], 4)
    async with serving(FakeExecutor(depth=2)) as engine, engine.admit(1, 0) as ticket:
        choices = await ticket.submit(request([5], 50), watchers=[StopAt(want[3])])
        assert await collect(choices) == {0: (want, FinishReason.STOP)}


async def test_a_watcher_that_raises_fails_its_own_choice_only():
    class Broken:
        def feed(self, token_ids: list[int]) -> int | None:
            raise ValueError("broken")

    async with serving() as engine, engine.admit(2, 0) as ticket:
        choices = await ticket.submit(request([5]), request([6]), watchers=[Broken(), None])
        answer = await collect(choices)

    assert answer == {0: ([], FinishReason.ERROR), 1: (continuation([6], 5), FinishReason.LENGTH)}


async def test_a_waiting_caller_may_take_tokens_as_they_are_pushed_and_wake_only_at_the_end():
    want = continuation([1, 2], 20)
    taken: list[int] = []

    def take(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        taken.extend(token_ids)
        return True

    async with serving() as engine, engine.admit(1, 0) as ticket:
        choices = await ticket.submit(request([1, 2], 20))
        with choices.consumed_by(take):
            deltas = [delta async for _, delta in choices]
        assert ticket.generated_tokens == 20

    assert taken == want[:-1]
    assert [(delta.token_ids, delta.finish) for delta in deltas] == [(want[-1:], FinishReason.LENGTH)]


async def test_tokens_that_are_not_taken_as_they_are_pushed_come_in_their_place():
    got: dict[int, list[int]] = {0: [], 1: []}
    asked = 0

    def take(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:
            return False
        got[index] += token_ids
        return True

    async with serving() as engine, engine.admit(2, 0) as ticket:
        choices = await ticket.submit(request([1, 2], 30, choices=2))
        with choices.consumed_by(take):
            async for index, delta in choices:
                got[index] += delta.token_ids

    assert asked > 10
    assert got == {n: continuation([1, 2], 30, seed=n) for n in range(2)}


async def test_tokens_that_cannot_be_taken_fail_their_own_choice_only():
    def take(index: int, token_ids: list[int], logprobs: list[TokenLogprobs]) -> bool:
        if index == 0:
            raise ValueError("broken")
        return False

    async with serving() as engine, engine.admit(2, 0) as ticket:
        choices = await ticket.submit(request([5]), request([6]))
        with choices.consumed_by(take):
            answer = await collect(choices)

    assert answer == {0: ([], FinishReason.ERROR), 1: (continuation([6], 5), FinishReason.LENGTH)}


async def test_abort_ends_a_request_by_its_id():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        choices = await ticket.submit(request([1], 200))
        await anext(choices)
        assert engine.abort(ticket.id)
        assert not engine.abort("unknown")
        rest = [delta async for _, delta in choices]

    assert rest[-1].finish is FinishReason.ABORT


async def test_a_request_aborted_before_it_is_queued_is_refused():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        assert engine.abort(ticket.id)
        with pytest.raises(Aborted):
            await ticket.submit(request([1]))


async def test_a_reader_gets_the_end_even_if_the_scheduler_fails():
    async with serving() as engine, engine.admit(2, 0) as ticket:
        choices = await ticket.submit(request([1], 200), request([2], 200))
        scheduler = engine.core.scheduler
        assert scheduler is not None
        remove, broken = scheduler.remove, []

        def once(*args):
            if not broken:
                broken.append(args)
                raise AssertionError("accounts")
            remove(*args)

        scheduler.remove = once  # type: ignore[method-assign]
        engine.fail_all(RequestFailed("over"))
        scheduler.remove = remove  # type: ignore[method-assign]
        assert [finish for _, finish in (await collect(choices)).values()] == [FinishReason.ERROR] * 2
        remove(*broken[0])


async def test_wrong_accounting_is_detected_when_the_engine_is_idle(caplog):
    async with serving() as engine:
        await ask(engine, request([1]))
        engine.watch()
        assert not caplog.records
        await ask(engine, request([2]))
        page = engine.core.scheduler.cache.pool.take()
        engine.watch()
        assert "page counts are inconsistent" in caplog.text
        engine.core.scheduler.cache.pool.release(page)


async def test_steps_behind_a_failed_one_are_waited_for_before_they_are_undone():
    executor = FakeExecutor(depth=2, fault=poisoned())
    async with serving(executor) as engine:
        rollback, seen = engine.core.scheduler.rollback, []

        def checked(plans):
            plans = list(plans)
            seen.append([issued for issued in executor.issued if not issued.result.done()])
            rollback(plans)

        engine.core.scheduler.rollback = checked
        await asyncio.gather(ask(engine, request([POISON])), ask(engine, request([1], 9)))
        assert seen
        assert not any(seen)


async def test_the_queue_is_bounded_in_choices():
    async with serving(max_waiting=3) as engine, engine.admit(2, 0):
        with pytest.raises(Overloaded):
            async with engine.admit(2, 0):
                pass


async def test_the_queue_is_bounded_in_prompt_tokens_but_takes_any_one_prompt():
    executor = FakeExecutor()
    async with serving(executor, max_waiting_tokens=10) as engine:
        executor.gate.clear()
        async with engine.admit(1, 0) as first, engine.admit(1, 0) as second, engine.admit(1, 0) as third:
            await first.submit(request([1] * 100, 1))
            assert engine.status().waiting_tokens == 100
            with pytest.raises(Overloaded):
                await second.submit(request([1], 1))
            with pytest.raises(Overloaded):
                async with engine.admit(1, 40):
                    pass
            await asyncio.sleep(0.01)
            assert engine.status().waiting_tokens == 0, "planned, so no longer waiting"
            await third.submit(request([1] * 8, 1))
        executor.gate.set()


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], InvalidRequest), ([1] * 256, PromptTooLong), ([512], InvalidRequest), ([-1], InvalidRequest)],
)
async def test_a_request_that_can_never_fit_is_refused(prompt: list[int], error: type[Exception]):
    async with serving() as engine, engine.admit(1, 0) as ticket:
        with pytest.raises(error):
            await ticket.submit(request(prompt))


async def test_no_request_is_admitted_before_the_model_is_loaded_or_while_draining():
    engine = Engine(LiveConfig(Config()), FakeExecutor(), Metrics())
    with pytest.raises(NotReady):
        async with engine.admit(1, 0):
            pass
    async with serving() as engine:
        async with engine.admit(1, 0) as ticket:
            draining = asyncio.create_task(engine.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(NotReady):
                async with engine.admit(1, 0):
                    pass
            answer = await collect(await ticket.submit(request([1, 2])))
            assert not draining.done(), "its reader is still here"
        assert await draining
        assert answer == {0: (continuation([1, 2], 5), FinishReason.LENGTH)}


async def test_a_request_in_preparation_is_refused_when_the_engine_fails():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        engine.fail_all(RequestFailed("shutting down"))
        with pytest.raises(NotReady):
            await ticket.submit(request([1]))


async def test_draining_gives_up_when_the_time_runs_out():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        executor.gate.clear()
        async with engine.admit(1, 0) as ticket:
            choices = await ticket.submit(request([1]))
            assert not await engine.drain(0.01)
            engine.fail_all(RequestFailed("shutting down"))
            (delta,) = [delta async for _, delta in choices]
            assert (delta.finish, str(delta.error)) == (FinishReason.ERROR, "shutting down")
        executor.gate.set()


def poisoned() -> Callable[[StepPlan], None]:
    seated = Seated()

    def fault(plan: StepPlan) -> None:
        if any(POISON in tokens for tokens in seated.of(plan)):
            raise RuntimeError("the device cannot compute this")

    return fault


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_one_request_that_fails_a_step_is_found_and_fails_alone(depth: int):
    async with serving(
        FakeExecutor(capacity(pages=256, rows=16, step_tokens=64), depth=depth, fault=poisoned())
    ) as engine:
        prompts = [[i, POISON if i == 11 else 1] for i in range(16)]
        answers = await asyncio.gather(*(ask(engine, request(prompt)) for prompt in prompts))

    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        want = ([], FinishReason.ERROR) if i == 11 else (continuation(prompt, 5), FinishReason.LENGTH)
        assert answer == {0: want}


async def test_steps_that_fail_at_random_change_no_answer():
    chance = random.Random(5)

    def flaky(plan: StepPlan) -> None:
        if len(plan.spans) > 1 and chance.random() < 0.3:
            raise RuntimeError("too large")

    async with serving(FakeExecutor(depth=2, fault=flaky)) as engine:
        answers = await asyncio.gather(*(ask(engine, request([i] * 9, 12)) for i in range(20)))

    assert answers == [{0: (continuation([i] * 9, 12), FinishReason.LENGTH)} for i in range(20)]


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_step_too_large_for_memory_is_retried_in_smaller_ones_and_changes_no_answer(depth: int):
    def small(plan: StepPlan) -> None:
        if plan.tokens > 9:
            raise StepTooLarge("no memory")

    async with serving(FakeExecutor(depth=depth, fault=small)) as engine:
        answers = await asyncio.gather(*(ask(engine, request([i] * 20, 6)) for i in range(12)))

    assert answers == [{0: (continuation([i] * 20, 6), FinishReason.LENGTH)} for i in range(12)]


async def test_a_single_token_that_does_not_fit_fails_its_request():
    def full(plan: StepPlan) -> None:
        raise StepTooLarge("no memory")

    async with serving(FakeExecutor(fault=full)) as engine:
        assert await ask(engine, request([1] * 20)) == {0: ([], FinishReason.ERROR)}


async def test_a_stuck_step_is_reported_once_and_cleared_by_progress():
    now = 0.0
    executor = FakeExecutor()
    engine = Engine(LiveConfig(Config()), executor, Metrics(), clock=lambda: now)
    await engine.load()
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    executor.gate.clear()
    asking = asyncio.create_task(ask(engine, request([1])))
    await asyncio.sleep(0.01)
    assert not engine.watch()
    now = PATIENCE_S + 1
    assert [engine.watch(), engine.watch(), engine.stuck] == [True, False, True]
    executor.gate.set()
    await asking
    assert [engine.watch(), engine.stuck] == [False, False]
    await engine.close()
    await running


async def test_a_lost_device_ends_every_stream_with_an_error_and_the_engine_fails():
    def lost(plan: StepPlan) -> None:
        if plan.number == 3:
            raise DeviceLost("poisoned")

    engine = Engine(LiveConfig(Config()), FakeExecutor(depth=2, fault=lost), Metrics())
    await engine.load()
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    answers = await asyncio.gather(*(ask(engine, request([i], 50)) for i in range(5)))
    with pytest.raises(DeviceLost):
        await running

    assert all(answer[0][1] is FinishReason.ERROR for answer in answers)
    assert engine.lifecycle.state is State.FAILED
    with pytest.raises(NotReady):
        async with engine.admit(1, 0):
            pass
    await engine.close()


class LosesDevice(FakeExecutor):
    """Loses its device in step 4, and reports it in the turn of the loop in which step 3 completes."""

    def ready(self, step: FakeStep) -> None:
        tell = asyncio.get_running_loop().call_soon
        if step.plan.number == 4:
            tell(self.issued[3].result.set_result, self.device.run(self.issued[3].plan))
            tell(step.result.set_exception, DeviceLost("poisoned"))
        elif step.plan.number < 3:
            tell(step.result.set_result, self.device.run(step.plan))


async def test_every_token_that_was_committed_before_the_device_was_lost_is_handed_out():
    engine = Engine(LiveConfig(Config()), LosesDevice(depth=2), Metrics())
    await engine.load()
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0)
    answers = await asyncio.gather(*(ask(engine, request([i], 50)) for i in range(3)))
    with pytest.raises(DeviceLost):
        await running

    assert answers == [{0: (continuation([i], 4), FinishReason.ERROR)} for i in range(3)]
    await engine.close()


async def test_logprobs_arrive_beside_their_tokens():
    async with serving() as engine, engine.admit(1, 0) as ticket:
        deltas = [delta async for _, delta in await ticket.submit(request([1], 3, logprobs=2))]

    assert [len(delta.logprobs) for delta in deltas] == [len(delta.token_ids) for delta in deltas]
    assert deltas[0].logprobs[0].top_ids[0] == deltas[0].token_ids[0]


async def test_prompt_logprobs_come_once_with_the_first_delta_of_the_first_choice():
    prompt = list(range(10, 160))
    async with serving() as engine, engine.admit(3, 0) as ticket:
        news = [each async for each in await ticket.submit(request(prompt, 3, choices=3, prompt_logprobs=2))]

    assert news[0][0] == 0
    assert news[0][1].prompt_logprobs == prompt_likelihoods(prompt, 2)
    assert not any(delta.prompt_logprobs for _, delta in news[1:])


async def test_a_prompt_that_is_only_scored_ends_without_a_token():
    prompt = list(range(10, 160))
    async with serving() as engine, engine.admit(1, 0) as ticket:
        (delta,) = [delta async for _, delta in await ticket.submit(request(prompt, 0, prompt_logprobs=0))]

    assert (delta.token_ids, delta.finish) == ([], FinishReason.LENGTH)
    assert delta.prompt_logprobs == prompt_likelihoods(prompt)
    assert engine.status().terminal["length"] == 1


async def test_a_request_with_nothing_to_compute_ends_at_once():
    executor = FakeExecutor()
    async with serving(executor) as engine:
        assert await ask(engine, request([1, 2, 3], 0)) == {0: ([], FinishReason.LENGTH)}
        assert await ask(engine, request([1], 0, prompt_logprobs=3)) == {0: ([], FinishReason.LENGTH)}
    assert executor.device.steps == 0


async def test_a_thousand_clients_that_leave_at_any_moment_leak_nothing():
    chance = random.Random(1)

    async def client(engine: Engine, number: int) -> None:
        patience = chance.choice([0, 0, 1, 2, 5, 99])
        async with engine.admit(2, 10) as ticket:
            if patience == 0 and number % 3 == 0:
                return
            choices = await ticket.submit(request([number % 5] * (1 + number % 30), 12, choices=2))
            async for _ in choices:
                patience -= 1
                if patience <= 0:
                    return

    async with serving(FakeExecutor(depth=2), max_num_seqs=16, max_waiting=4000) as engine:
        tasks = []
        for number in range(1000):
            tasks.append(asyncio.create_task(client(engine, number)))
            if number % 4 == 0:
                await asyncio.sleep(0)
            if chance.random() < 0.1:
                chance.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(result) for result in results} == {type(None), asyncio.CancelledError}


async def test_an_idle_engine_does_nothing():
    async with serving() as engine:
        await ask(engine, request([1]))
        await asyncio.sleep(0.01)
        steps = engine.status().steps
        plans: list[int] = []
        engine.core.scheduler.plan = lambda only=None: plans.append(1)  # type: ignore[method-assign,assignment]
        for _ in range(50):
            await asyncio.sleep(0)
        assert (engine.status().steps, plans) == (steps, [])


@pytest.mark.parametrize("preempting", [False, True])
async def test_after_a_prefix_cache_reset_answers_are_unchanged_and_no_old_page_is_reused(preempting: bool):
    executor = FakeExecutor(depth=2)
    async with serving(executor) as engine:
        async with engine.admit(1, 0) as ticket:
            await collect(await ticket.submit(request([5] * 40, 8)))
        asking = [asyncio.create_task(ask(engine, request([i] * 40, 60))) for i in range(4)]
        while engine.status().steps < 12:
            await asyncio.sleep(0)
        pages, preempted = engine.core.forget_prefixes(preempting=preempting)
        assert pages
        assert preempted == (4 if preempting else 0)
        async with engine.admit(1, 0) as ticket:
            assert await collect(await ticket.submit(request([5] * 40, 8))) == {
                0: (continuation([5] * 40, 8), FinishReason.LENGTH)
            }
            assert ticket.cached_tokens == 0
        answers = await asyncio.gather(*asking)
    assert answers == [{0: (continuation([i] * 40, 60), FinishReason.LENGTH)} for i in range(4)]
