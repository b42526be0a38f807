from __future__ import annotations

import pytest

from infd.request import Adapter, FinishReason, Generate, Request, SamplingParams
from infd.scheduler.layout import CacheLayout, PageGroup, Regimes
from infd.scheduler.plan import StepResult
from infd.scheduler.prefix import longest_hit, page_keys
from infd.scheduler.sequence import Sequence
from infd.scheduler.token_budget import MANY_STARTING
from tests.fakes import capacity, continuation
from tests.scheduler.driver import NOT_FINITE, Driver, granted, sequence

WINDOW = CacheLayout((PageGroup(layers=(0,), page_tokens=4, window=8),))
MIXED = CacheLayout(
    (PageGroup(layers=(0, 1), page_tokens=4), PageGroup(layers=(2, 3), page_tokens=8, window=8)),
)
NOTHING = CacheLayout((), divisible=False)
OUTGROWN = CacheLayout((PageGroup(layers=(0,), page_tokens=4),), regimes=Regimes(outgrown=12))
BY_PROMPT = CacheLayout((PageGroup(layers=(0,), page_tokens=4),), regimes=Regimes(prompt_over=12))


def test_a_long_prompt_does_not_hold_up_a_decoding_sequence():
    driver = Driver(capacity(step_tokens=8))
    decoding = driver.add(sequence(3))
    driver.step()
    waiting = driver.add(sequence(list(range(40))))

    assert granted(driver.issue()) == {decoding: 1, waiting: 7}


def test_steps_may_be_planned_ahead_once_the_last_chunk_is_planned_and_until_a_prompt_arrives():
    driver = Driver(capacity(step_tokens=8, rows=1))
    scheduler = driver.scheduler
    driver.add(sequence(12, max_tokens=4))
    found = [scheduler.may_plan_ahead]
    for _ in range(3):
        driver.step()
        found.append(scheduler.may_plan_ahead)
    assert found == [False, False, True, True]
    driver.add(sequence(3))
    assert not scheduler.may_plan_ahead


def test_beside_streams_a_prompt_is_computed_in_smaller_chunks_than_alone():
    driver = Driver(capacity(step_tokens=16, mixed_tokens=8, pages=64))
    driver.add(sequence(40, max_tokens=1))
    driver.finish()
    decoding = driver.add(sequence(3, max_tokens=20))
    driver.step()
    waiting = driver.add(sequence([7] * 40, max_tokens=1))

    assert [plan.tokens for plan in driver.plans[:3]] == [16, 16, 8]
    assert granted(driver.issue()) == {decoding: 1, waiting: 7}


def test_many_streams_leave_a_prompt_half_as_much_as_they_take():
    driver = Driver(capacity(step_tokens=32, mixed_tokens=8, rows=16, pages=256))
    decoding = [driver.add(sequence([number, 1, 2], max_tokens=20)) for number in range(12)]
    driver.step()
    driver.step()
    waiting = driver.add(sequence([7] * 40, max_tokens=1))

    plan = granted(driver.issue())
    assert plan == dict.fromkeys(decoding, 1) | {waiting: 10}


def test_a_crowd_of_prompts_is_computed_in_larger_chunks_beside_streams():
    driver = Driver(capacity(step_tokens=32, mixed_tokens=8, crowded_tokens=20, rows=16, pages=256))
    decoding = driver.add(sequence(3, max_tokens=20))
    driver.step()
    waiting = [driver.add(sequence([number] * 16, max_tokens=1)) for number in range(MANY_STARTING + 1)]

    assert granted(driver.issue()) == {decoding: 1, waiting[0]: 16, waiting[1]: 3}
    driver.complete()
    assert granted(driver.issue()) == {decoding: 1, waiting[1]: 7}, "no crowd any more"


def no_crowd(prompts: list[Sequence], *, rows: int) -> None:
    driver = Driver(capacity(step_tokens=32, mixed_tokens=8, crowded_tokens=20, rows=rows, pages=256))
    decoding = driver.add(sequence(3, max_tokens=20))
    driver.step()
    for seq in prompts:
        driver.add(seq)

    assert granted(driver.issue()) == {decoding: 1, prompts[0]: 7}


def test_a_sequence_without_a_row_does_not_count_toward_the_crowd():
    no_crowd([sequence([number] * 16) for number in range(MANY_STARTING + 1)], rows=2)


def test_choices_of_one_request_do_not_count_as_a_crowd():
    request = Request(id="r", prompt=(7,) * 16, wants=(Generate(SamplingParams(max_tokens=4)),))
    no_crowd([Sequence(request, choice) for choice in range(MANY_STARTING + 1)], rows=16)


def test_streams_that_fill_a_step_leave_a_prompt_nothing():
    driver = Driver(capacity(step_tokens=4, mixed_tokens=4, rows=8, pages=64))
    decoding = [driver.add(sequence([number], max_tokens=20)) for number in range(4)]
    driver.step()
    driver.add(sequence(8, max_tokens=1))

    assert granted(driver.issue()) == dict.fromkeys(decoding, 1)


def test_a_prompt_longer_than_a_step_is_computed_in_chunks_and_sampled_once():
    driver = Driver(capacity(step_tokens=8))
    driver.add(sequence(20, max_tokens=1))
    driver.finish()

    assert [(s.start, s.count, s.samples) for plan in driver.plans for s in plan.spans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]


def test_a_length_stop_costs_no_surplus_token_with_steps_in_flight():
    driver = Driver(depth=3)
    seq = driver.add(sequence(3, max_tokens=5))
    driver.finish()

    assert seq.finish is FinishReason.LENGTH
    assert sum(plan.tokens for plan in driver.plans) == 3 + 4


def test_an_end_id_ends_the_sequence_and_the_surplus_is_dropped():
    prompt = [7, 8, 9]
    answer = continuation(prompt, 6)
    driver = Driver(depth=2)
    seq = driver.add(sequence(prompt, max_tokens=50, end_ids=frozenset({answer[2]})))
    driver.finish()

    assert seq.finish is FinishReason.STOP
    assert seq.tokens == prompt + answer[: answer.index(answer[2]) + 1]


def test_a_sequence_ends_where_the_model_can_read_no_more():
    driver = Driver(capacity(max_model_len=10))
    seq = driver.add(sequence(6, max_tokens=100))
    driver.finish()

    assert (len(seq.tokens), seq.finish) == (10, FinishReason.LENGTH)


def test_a_warm_prefix_is_not_computed_again_but_its_last_token_is():
    driver = Driver()
    driver.add(sequence(16, max_tokens=1))
    driver.finish()
    again = driver.add(sequence(16, max_tokens=1))
    step = driver.issue()

    assert again.prompt_cached == 12
    assert granted(step) == {again: 4}
    assert (driver.scheduler.prefix_queries, driver.scheduler.prefix_hits) == (32, 12)


def test_generated_pages_are_found_by_the_next_turn_of_a_conversation():
    driver = Driver(depth=2)
    first = driver.add(sequence(6, max_tokens=11))
    driver.finish()
    second = driver.add(sequence([*first.tokens, 1, 2], max_tokens=1))
    driver.issue()

    assert second.prompt_cached == 16


def spans_of(driver: Driver, seq: Sequence) -> list[tuple[int, int, bool, int]]:
    spans = [
        span for step in driver.steps for at, span in zip(step.sequences, step.plan.spans, strict=True) if at is seq
    ]
    return [(span.start, span.count, span.samples, span.scores) for span in spans]


def test_a_prompt_to_be_scored_is_computed_whole_and_fills_the_cache_for_others():
    driver = Driver(capacity(step_tokens=8))
    driver.add(sequence(20))
    driver.finish()
    scored = driver.add(sequence(20, max_tokens=1, scored=2))
    driver.finish()
    other = driver.add(sequence(20))
    driver.finish()

    assert spans_of(driver, scored) == [(0, 8, False, 8), (8, 8, False, 8), (16, 4, True, 3)]
    assert other.prompt_cached == 16
    assert (driver.scheduler.prefix_queries, driver.scheduler.prefix_hits) == (20 + 20, 16), "none for the scored one"
    driver.check_answers()


def test_scored_tokens_count_for_more_of_a_step_until_all_are_scored():
    driver = Driver(capacity(step_tokens=16, score_cost=4))
    scored = driver.add(sequence(10, scored=0))
    behind = driver.add(sequence([7] * 20))

    assert [granted(driver.step()) for _ in range(2)] == [{scored: 4}] * 2, "nobody comes in before its end"
    assert granted(driver.step()) == {scored: 2, behind: 8}
    assert granted(driver.step()) == {scored: 1, behind: 12}, "its scores were not yet known when this was planned"
    assert granted(driver.step()) == {scored: 1, behind: 1}
    driver.finish()
    driver.check_answers()


def test_a_token_that_weighs_more_than_a_step_is_computed_too():
    driver = Driver(capacity(step_tokens=8, score_cost=20))
    driver.add(sequence(9, scored=0))
    driver.finish()

    assert [plan.tokens for plan in driver.plans[:9]] == [1] * 9
    driver.check_answers()


def test_a_truncated_span_of_scored_tokens_costs_the_rest_of_the_step():
    driver = Driver(capacity(step_tokens=16, score_cost=3))
    driver.add(sequence(9, max_tokens=1))
    driver.finish()
    scored = driver.add(sequence(9, scored=0))
    cached = driver.add(sequence(9))

    assert granted(driver.step()) == {scored: 5}
    assert granted(driver.step()) == {scored: 4, cached: 1}


def test_a_choice_waits_for_the_scores_of_its_prompt_while_the_first_choice_lacks_pages():
    driver = Driver(capacity(pages=262, step_tokens=64, max_model_len=600, score_cost=2))
    prompt = [i % 7 for i in range(517)]
    other = driver.add(sequence(prompt, max_tokens=60))
    while not other.generated:
        driver.step()
    first = driver.add(sequence(prompt, max_tokens=1, scored=0))
    second = driver.add(sequence(prompt, max_tokens=1, first=first))
    while granted(driver.step()) != {other: 1}:
        assert first.owes_scores

    assert (second.row, second.generated) == (None, 0), "what it needs beside the cached pages is there"
    driver.finish()
    driver.check_answers()


def test_a_scored_prompt_whose_answer_is_preempted_may_read_its_own_pages():
    driver = Driver(capacity(step_tokens=32))
    seq = driver.add(sequence(20, max_tokens=3, scored=0))
    driver.step()
    driver.scheduler.preempt(seq)
    driver.finish()

    assert spans_of(driver, seq) == [(0, 20, True, 19), (20, 1, True, 0), (21, 1, True, 0)]
    driver.check_answers()


def test_of_a_prompt_that_is_only_scored_the_last_token_is_not_computed():
    driver = Driver(capacity(step_tokens=8), depth=2)
    seq = driver.add(sequence(10, max_tokens=0, scored=0))
    driver.finish()

    assert spans_of(driver, seq) == [(0, 8, False, 8), (8, 1, False, 1)]
    assert seq.finish is FinishReason.LENGTH
    driver.check_answers()


def test_another_root_never_hits():
    driver = Driver()
    driver.add(sequence(16, max_tokens=1, root=b"one tenant"))
    driver.finish()
    other = driver.add(sequence(16, max_tokens=1, root=b"another"))
    driver.issue()

    assert other.prompt_cached == 0


def test_caching_can_be_switched_off():
    driver = Driver(caching=False)
    for _ in range(2):
        driver.add(sequence(16, max_tokens=1))
        driver.finish()

    assert len(driver.scheduler.cache.index) == 0
    assert sum(plan.tokens for plan in driver.plans) == 32


def test_the_page_unused_longest_is_evicted_first():
    driver = Driver(capacity(pages=8, max_model_len=32))
    old = driver.add(sequence([1] * 9, max_tokens=1))
    driver.finish()
    new = driver.add(sequence([2] * 9, max_tokens=1))
    driver.finish()
    driver.add(sequence([3] * 20, max_tokens=1))
    driver.finish()

    hits = []
    for earlier in (new, old):
        again = driver.add(sequence(earlier.tokens[:9], max_tokens=1))
        driver.finish()
        hits.append(again.prompt_cached)
    assert hits == [8, 0]


def test_siblings_come_behind_the_first_and_share_its_full_pages():
    driver = Driver()
    leader = driver.add(sequence(30, max_tokens=3, seed=1))
    sibling = driver.add(sequence(30, max_tokens=3, seed=2))
    first, second = driver.issue(), driver.issue()

    assert granted(first) == {leader: 16}
    assert granted(second) == {leader: 14, sibling: 2}
    driver.complete()
    driver.complete()
    driver.finish()
    driver.check_answers()
    assert leader.tokens != sibling.tokens


def test_when_pages_run_out_the_latest_arrival_is_preempted_and_keeps_its_place():
    driver = Driver(capacity(pages=6, max_model_len=24))
    early = driver.add(sequence([1] * 7, max_tokens=12))
    late = driver.add(sequence([2] * 7, max_tokens=12))
    driver.step()
    later = driver.add(sequence([3] * 7, max_tokens=2))
    while late.row is not None:
        assert later.row is None, "nobody overtakes"
        driver.step()

    assert early.row is not None
    assert list(driver.scheduler.waiting)[:2] == [late, later]
    driver.finish()
    driver.check_answers()
    assert driver.scheduler.preemptions >= 1


def test_priority_is_a_bounded_head_start():
    driver = Driver(capacity(rows=1), patience=4)
    driver.add(sequence(3))
    driver.step()
    polite = driver.add(sequence(3, priority=1))
    others = [driver.add(sequence(3)) for _ in range(6)]

    assert list(driver.scheduler.waiting) == [*others[:3], polite, *others[3:]]


def test_a_window_frees_the_pages_behind_it():
    driver = Driver(capacity(WINDOW, pages=8, step_tokens=8, max_model_len=64))
    seq = driver.add(sequence(40, max_tokens=20))
    most = 0
    while seq.finish is None:
        driver.step()
        most = max(most, driver.scheduler.cache.pool.referenced)

    assert most <= 5
    driver.check_answers()


def test_a_hit_needs_only_the_window_of_a_windowed_group():
    driver = Driver(capacity(WINDOW, pages=16, max_model_len=64))
    driver.add(sequence(33, max_tokens=1))
    driver.finish()
    again = driver.add(sequence(33, max_tokens=1))
    driver.issue()

    assert again.prompt_cached == 32
    assert driver.scheduler.cache.pool.referenced == 3


def test_two_groups_agree_on_one_boundary():
    driver = Driver(capacity(MIXED, pages=64, max_model_len=64))
    driver.add(sequence(30, max_tokens=1))
    driver.finish()
    again = driver.add(sequence(30, max_tokens=6))
    driver.issue()

    assert again.prompt_cached == 24
    driver.complete()
    driver.finish()
    driver.check_answers()


def test_no_groups_means_whole_prompts_and_no_pages():
    driver = Driver(capacity(NOTHING, pages=0, step_tokens=16))
    first, second = driver.add(sequence(10, max_tokens=1)), driver.add(sequence(9, max_tokens=1))

    assert granted(driver.issue()) == {first: 10}
    assert granted(driver.issue()) == {second: 9}
    driver.complete()
    driver.complete()
    driver.check_answers()


def test_rows_and_pages_of_a_removed_sequence_serve_the_very_next_plan():
    driver = Driver(capacity(rows=1, pages=4, max_model_len=16), depth=2)
    first = driver.add(sequence(12))
    second = driver.add(sequence([5] * 12))
    driver.issue()
    driver.scheduler.remove(first, FinishReason.ABORT)
    step = driver.issue()

    assert granted(step) == {second: 12}
    driver.finish()
    driver.check_answers()


def test_a_failed_step_gives_everyone_back_their_known_tokens():
    driver = Driver(depth=2)
    a, b = driver.add(sequence(9, max_tokens=9)), driver.add(sequence([4] * 9, max_tokens=9))
    driver.issue()
    driver.issue()
    driver.complete()
    known = [len(a.tokens), len(b.tokens)]
    driver.issue()
    driver.fail()

    assert [len(a.tokens), len(b.tokens)] == known
    assert (driver.scheduler.preemptions, driver.scheduler.undone) == (0, 2)
    assert driver.scheduler.running == []
    driver.finish()
    driver.check_answers()


def test_pages_that_a_failed_step_was_to_fill_are_never_found():
    driver = Driver()
    driver.add(sequence(9, max_tokens=3))
    driver.issue()
    driver.fail()

    assert len(driver.scheduler.cache.index) == 0


def test_one_failed_sequence_does_not_stop_its_neighbour():
    driver = Driver()
    bad, good = driver.add(sequence([1] * 5)), driver.add(sequence([2] * 5))
    step = driver.scheduler.plan()
    assert step is not None
    result = driver.device.run(step.plan)
    driver.scheduler.commit(step, StepResult([0, 1], result.tokens[1:], failed={0: NOT_FINITE}))
    driver.scheduler.verify()
    driver.finish()

    assert (bad.finish, str(bad.failure)) == (FinishReason.ERROR, "not finite")
    assert len(good.tokens) == 9
    again = driver.add(sequence([1] * 5))
    driver.finish()
    assert again.prompt_cached == 0, "what a failed sequence wrote is not shared"


def test_only_failed_sequences_pages_of_a_step_are_unindexed():
    driver = Driver(depth=2)
    bad, good, gone = (driver.add(sequence([i] * 5, max_tokens=9, root=b"\0")) for i in range(1, 4))
    step = driver.issue()
    assert step is not None
    driver.issue()
    driver.scheduler.remove(gone, FinishReason.ABORT)
    result = driver.device.run(driver.in_flight.popleft().plan)
    driver.scheduler.commit(step, StepResult([0, 1, 0], result.tokens[1:2], failed={0: NOT_FINITE, 2: NOT_FINITE}))
    driver.check()
    driver.finish()

    assert bad.finish is FinishReason.ERROR
    assert len(good.tokens) == 14
    assert [cached_of(driver, [i] * 5) for i in range(1, 4)] == [0, 4, 0]


def test_pages_of_a_failed_sequence_that_a_step_in_flight_was_to_fill_are_not_found():
    driver = Driver(capacity(step_tokens=8), depth=2)
    bad = driver.add(sequence([1] * 20))
    steps = [driver.issue(), driver.issue()]
    driver.scheduler.preempt(bad)
    assert steps[0] is not None
    driver.scheduler.commit(steps[0], StepResult([0], [], failed={0: NOT_FINITE}))
    driver.check()

    assert len(driver.scheduler.cache.index) == 0


def test_a_preempted_sequence_runs_again_only_when_its_last_step_is_committed():
    driver = Driver(capacity(pages=5, max_model_len=20), depth=3)
    early = driver.add(sequence([1] * 8, max_tokens=12))
    late = driver.add(sequence([2] * 3, max_tokens=12))
    driver.issue()
    while late.row is not None:
        driver.complete()
        driver.issue()
        driver.issue()
    assert late.in_flight
    driver.scheduler.remove(early, FinishReason.ABORT)

    assert driver.issue() is None
    driver.finish()
    driver.check_answers()


def test_after_a_step_that_did_not_fit_steps_are_halved_and_grow_back():
    driver = Driver(capacity(step_tokens=16, pages=512, max_model_len=2000))
    driver.add(sequence([1] * 1500, max_tokens=1))
    step = driver.issue()
    assert step is not None
    driver.fail()
    assert driver.scheduler.shrink(step)
    for _ in range(70):
        driver.step()

    assert {p.tokens for p in driver.plans[1:60]} == {8}
    assert driver.plans[70].tokens == 16


def test_a_step_of_scored_tokens_that_did_not_fit_is_halved_as_it_was_counted():
    driver = Driver(capacity(step_tokens=16, score_cost=4))
    seq = driver.add(sequence(12, scored=0))
    step = driver.issue()
    driver.fail()
    assert granted(step) == {seq: 4}
    assert driver.scheduler.shrink(step)

    assert granted(driver.issue()) == {seq: 2}
    driver.finish()
    driver.check_answers()


def test_steps_are_halved_down_to_one_token_however_much_a_scored_one_counts_for():
    driver = Driver(capacity(step_tokens=16, score_cost=20))
    driver.add(sequence([1] * 3, max_tokens=9))
    driver.step()
    driver.add(sequence(12, scored=0))
    sizes = []
    for _ in range(9):
        step = driver.issue()
        assert step is not None
        sizes.append(step.plan.tokens)
        driver.fail()
        if not driver.scheduler.shrink(step):
            break

    assert sizes == [2, 5, 4, 2, 1]


def test_a_step_of_one_token_cannot_be_halved():
    driver = Driver()
    driver.add(sequence(1))
    step = driver.issue()
    assert step is not None

    assert not driver.scheduler.shrink(step)


def preempted_in_flight(pages: int) -> tuple[Driver, Sequence]:
    """Return a driver in which the later of two sequences was preempted with a step of it in flight, and that one."""
    driver = Driver(capacity(pages=pages, max_model_len=20, rows=3), depth=3)
    early = driver.add(sequence([1] * 8, max_tokens=12))
    late = driver.add(sequence([2] * 3, max_tokens=12))
    driver.issue()
    driver.issue()
    driver.scheduler.preempt(late)
    driver.scheduler.remove(early, FinishReason.ABORT)
    assert late.in_flight
    return driver, late


def test_a_later_sequence_takes_no_pages_that_a_preempted_one_needs():
    driver, late = preempted_in_flight(pages=5)
    latest = driver.add(sequence([3] * 13, max_tokens=1))

    assert driver.issue() is None, "its last step is in flight, and the one behind it waits with it"
    driver.complete()
    driver.complete()
    assert late in granted(driver.issue())
    driver.finish()
    driver.check_answers()
    assert latest.finish is FinishReason.LENGTH


def test_a_later_sequence_takes_no_row_that_a_preempted_one_needs():
    driver, late = preempted_in_flight(pages=64)
    others = [driver.add(sequence([i] * 3)) for i in range(3, 6)]

    assert granted(driver.issue()) == dict.fromkeys(others[:2], 3)
    driver.complete()
    driver.complete()
    assert late in granted(driver.issue())
    driver.finish()
    driver.check_answers()


def test_others_run_beside_a_preempted_sequence_whose_last_step_is_in_flight():
    driver, late = preempted_in_flight(pages=64)
    for _ in range(6):  # however long ago it came
        driver.scheduler.remove(driver.add(sequence(1)), FinishReason.ABORT)
    latest = driver.add(sequence([3], max_tokens=1))

    assert granted(driver.issue()) == {latest: 1}
    driver.finish()
    driver.check_answers()
    assert len(late.tokens) == 15


def test_an_aborted_preempted_sequence_delays_no_other():
    driver, late = preempted_in_flight(pages=5)
    latest = driver.add(sequence([3] * 13, max_tokens=1))
    assert driver.issue() is None
    driver.scheduler.remove(late, FinishReason.ABORT)

    assert granted(driver.issue()) == {latest: 13}


def test_an_admission_leaves_every_answer_its_next_page():
    driver = Driver(capacity(pages=5, max_model_len=20))
    running = driver.add(sequence([1] * 4, max_tokens=8))
    driver.step()
    waiting = driver.add(sequence([2] * 8, max_tokens=8))
    driver.step()
    assert waiting.row is None
    driver.finish()

    assert running.finish is waiting.finish is FinishReason.LENGTH
    assert driver.scheduler.preemptions == 0


def test_cached_pages_that_a_hit_takes_are_not_counted_as_free():
    driver = Driver(capacity(pages=8, step_tokens=32, max_model_len=32))
    driver.add(sequence([1] * 17, max_tokens=1))
    driver.finish()
    running = driver.add(sequence([2] * 9, max_tokens=8))
    driver.step()
    again = driver.add(sequence([1] * 17, max_tokens=8))
    driver.step()

    assert again.row is None
    assert driver.scheduler.cache.pool.cached == 4
    driver.finish()
    assert running.finish is FinishReason.LENGTH
    assert driver.scheduler.preemptions == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    driver = Driver(capacity(pages=8, max_model_len=32))
    driver.add(sequence([1] * 17, max_tokens=1))
    driver.finish()
    driver.add(sequence([2] * 20, max_tokens=1))
    driver.finish()
    again = driver.add(sequence([1] * 17, max_tokens=1))
    driver.issue()

    assert again.prompt_cached == 12


def test_a_hit_in_a_windowed_group_is_found_in_few_looks(monkeypatch):
    driver = Driver(capacity(WINDOW, pages=4096, step_tokens=64, max_model_len=9000))
    driver.add(sequence([1] * 8000, max_tokens=1))
    driver.finish()
    driver.scheduler.cache.index.forget(driver.scheduler.cache.index.find(0, page_keys(sequence([1] * 8000), 4)[1999]))
    find, looks = driver.scheduler.cache.index.find, []
    monkeypatch.setattr(driver.scheduler.cache.index, "find", lambda *key: looks.append(key) or find(*key))
    again = sequence([1] * 8004 + [2], max_tokens=1)

    assert longest_hit(again, WINDOW, driver.scheduler.cache.index) == 7996
    assert len(looks) < 12


def test_pages_of_a_sequence_that_failed_after_it_was_preempted_are_not_found():
    driver = Driver()
    bad = driver.add(sequence([1] * 9))
    step = driver.scheduler.plan()
    assert step is not None
    driver.scheduler.preempt(bad)
    driver.scheduler.commit(step, StepResult([0], [], failed={0: NOT_FINITE}))
    driver.scheduler.verify()

    assert len(driver.scheduler.cache.index) == 0


def cached_of(driver: Driver, prompt: list[int]) -> int | None:
    """Return how much of a prompt a newcomer finds in the cache."""
    seq = driver.add(sequence(prompt, max_tokens=1, root=bytes([driver.epoch])))
    while seq.prompt_cached is None:
        driver.step()
    return seq.prompt_cached


def test_a_reset_prefix_cache_gives_no_hits_and_frees_its_pages():
    driver = Driver(capacity(step_tokens=32))
    driver.add(sequence([1] * 17, max_tokens=1))
    driver.finish()
    assert driver.scheduler.cache.pool.cached == 4

    assert driver.forget(preempting=False) == 4
    assert driver.scheduler.cache.pool.cached == 0
    assert cached_of(driver, [1] * 17) == 0
    driver.finish()
    assert cached_of(driver, [1] * 17) == 16


def test_a_sequence_running_during_a_reset_continues_and_indexes_no_old_pages():
    driver = Driver(capacity(step_tokens=32), depth=2)
    running = driver.add(sequence([1] * 17, max_tokens=20))
    driver.step()
    tokens = sum(plan.tokens for plan in driver.plans)
    driver.forget(preempting=False)
    driver.issue()
    assert sum(plan.tokens for plan in driver.plans) == tokens + 1
    assert cached_of(driver, [1] * 17) == 0
    driver.finish()
    # All indexed pages are now the new sequence's.
    assert len(driver.scheduler.cache.index) == 4
    assert running.finish is FinishReason.LENGTH
    driver.check_answers()


def test_a_sequence_preempted_during_a_reset_is_recomputed_from_its_first_token_and_indexed():
    driver = Driver(capacity(step_tokens=32), depth=2)
    running = driver.add(sequence([1] * 17, max_tokens=20))
    for _ in range(5):
        driver.step()
    while driver.in_flight:
        driver.complete()
    known = len(running.tokens)
    driver.forget(preempting=True)
    assert granted(driver.issue()) == {running: known}
    driver.finish()
    assert cached_of(driver, [1] * 17) == 16
    driver.check_answers()


def test_a_sequence_waiting_during_a_reset_looks_up_its_prefix_under_the_new_root():
    driver = Driver(capacity(step_tokens=32, rows=1))
    first = driver.add(sequence([1] * 17, max_tokens=2))
    second = driver.add(sequence([1] * 17, max_tokens=2))
    driver.step()
    driver.forget(preempting=False)
    third = driver.add(sequence([1] * 17, max_tokens=2, root=bytes([driver.epoch])))
    driver.finish()
    assert [seq.prompt_cached for seq in (first, second, third)] == [0, 0, 16]


def adapters(count: int) -> list[Adapter]:
    return [Adapter("a", generation) for generation in range(1, count + 1)]


def test_results_in_flight_of_a_held_sequence_are_dropped_and_recomputed():
    driver = Driver(depth=2)
    held, other = (driver.add(sequence([i] * 5)) for i in range(1, 3))
    driver.issue()
    driver.issue()
    driver.scheduler.hold(held)
    driver.complete()
    driver.complete()

    assert (len(held.tokens), len(other.tokens)) == (5, 7)
    driver.scheduler.resume(held)
    driver.finish()
    driver.check_answers()
    assert held.finish is FinishReason.LENGTH


def test_results_in_flight_at_a_hold_are_dropped_even_if_the_sequence_resumes_before_they_arrive():
    driver = Driver(capacity(rows=1), depth=3)
    held = driver.add(sequence(1, max_tokens=4))
    driver.step()
    driver.scheduler.hold(held)
    driver.complete()
    driver.scheduler.resume(held)
    driver.finish()

    driver.check_answers()


def test_a_slot_is_filled_once_for_all_sequences_of_its_adapter():
    (adapter,) = adapters(1)
    driver = Driver()
    first = driver.add(sequence(3, adapter=adapter))
    second = driver.add(sequence([1] * 3, adapter=adapter))
    other = driver.add(sequence([2] * 3))
    step = driver.issue()

    assert step is not None
    assert [(load.slot, load.adapter) for load in step.plan.loads] == [(1, adapter)]
    assert [(join.row, join.slot) for join in step.plan.joins] == [(first.row, 1), (second.row, 1), (other.row, 0)]
    driver.complete()
    driver.finish()
    driver.check_answers()
    assert sum(len(plan.loads) for plan in driver.plans) == 1


def test_an_adapter_stays_in_its_slot_until_another_needs_the_place():
    a, b, c = adapters(3)
    driver = Driver(slots=2, per_step=2)
    for adapter in (a, b, a, c, a, b):
        driver.add(sequence([1] * 3, adapter=adapter))
        driver.finish()

    assert [[(load.slot, load.adapter) for load in plan.loads] for plan in driver.plans if plan.loads] == [
        [(1, a)],
        [(2, b)],
        [(2, c)],
        [(2, b)],
    ]
    driver.check_answers()


def test_beyond_the_adapters_per_step_the_next_waits_and_is_passed_by_few():
    a, b = adapters(2)
    driver = Driver(capacity(rows=16, pages=256, step_tokens=64), patience=4, slots=1, per_step=1)
    running = driver.add(sequence([1] * 3, max_tokens=40, adapter=a))
    driver.step()
    waiting = driver.add(sequence([2] * 3, adapter=b))
    later = [driver.add(sequence([3] * 3, max_tokens=40, adapter=a if i % 2 else None)) for i in range(8)]
    driver.step()

    assert waiting.row is None
    assert [seq.row is not None for seq in later] == [True] * 4 + [False] * 4
    driver.finish()
    driver.check_answers()
    assert running.finish is FinishReason.LENGTH


def test_a_sequence_waiting_for_an_adapter_slot_is_not_starved_by_later_ones():
    a, b = adapters(2)
    driver = Driver(patience=3, slots=1, per_step=1)
    driver.add(sequence([1] * 3, max_tokens=3, adapter=a))
    driver.step()
    waiting = driver.add(sequence([2] * 3, adapter=b))
    arrivals = 0
    while waiting.finish is None:
        arrivals += 1
        driver.add(sequence([1] * 3, max_tokens=3, adapter=a))
        driver.step()

    assert arrivals < 20
    driver.finish()
    driver.check_answers()


def test_a_preempted_sequence_keeps_no_slot_from_others():
    a, b = adapters(2)
    driver = Driver(slots=1, per_step=1)
    first = driver.add(sequence([1] * 6, max_tokens=6, adapter=a))
    driver.step()
    driver.scheduler.preempt(first)
    driver.scheduler.remove(first, FinishReason.ABORT)
    second = driver.add(sequence([2] * 6, max_tokens=6, adapter=b))
    driver.finish()

    assert second.finish is FinishReason.LENGTH
    driver.check_answers()


def test_an_adapter_whose_load_failed_is_loaded_again():
    (adapter,) = adapters(1)
    driver = Driver()
    driver.add(sequence([1] * 3, adapter=adapter))
    driver.issue()
    driver.fail()
    step = driver.issue()

    assert step is not None
    assert [load.adapter for load in step.plan.loads] == [adapter]
    driver.complete()
    driver.finish()
    driver.check_answers()


def test_an_adapter_whose_load_failed_may_have_had_another_step_s_sequences_by_then():
    (adapter,) = adapters(1)
    driver = Driver(depth=2)
    for token in (1, 2):
        driver.add(sequence([token] * 3, adapter=adapter))
        driver.issue()
    assert [len(step.plan.loads) for step in driver.in_flight] == [1, 0]
    driver.fail()

    driver.finish()
    driver.check_answers()


def computed_of(driver: Driver, seq: Sequence) -> list[tuple[int, int]]:
    return [(start, count) for start, count, _, _ in spans_of(driver, seq)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sequence_that_outgrows_its_regime_is_recomputed_once_and_no_token_is_sampled_twice(depth):
    driver = Driver(capacity(OUTGROWN), depth=depth)
    seq = driver.add(sequence(9, max_tokens=8))
    driver.finish()
    driver.check_answers()

    assert computed_of(driver, seq) == [(0, 9), (9, 1), (10, 1), (11, 1), (0, 13), (13, 1), (14, 1), (15, 1)]
    joins = [join for plan in driver.plans for join in plan.joins]
    assert [(len(join.tokens), join.regime) for join in joins] == [(9, 0), (13, 1)]
    assert driver.scheduler.preemptions == 0, "no page was wanting"


@pytest.mark.parametrize(("prompt", "answer", "regimes"), [(12, 1, [0]), (11, 2, [0]), (12, 2, [0, 1]), (13, 1, [1])])
def test_a_sequence_changes_its_regime_only_where_a_token_beyond_is_computed(prompt, answer, regimes):
    driver = Driver(capacity(OUTGROWN), depth=2)
    driver.add(sequence(prompt, max_tokens=answer))
    driver.finish()
    driver.check_answers()

    assert [join.regime for plan in driver.plans for join in plan.joins] == regimes


def test_a_stop_at_the_boundary_costs_no_recomputation():
    prompt = list(range(100, 109))
    last = continuation(prompt, 4, layout=OUTGROWN)[-1]
    driver = Driver(capacity(OUTGROWN), depth=2)
    seq = driver.add(sequence(prompt, max_tokens=8, end_ids=frozenset({last})))
    driver.finish()

    assert (len(seq.tokens), seq.finish) == (13, FinishReason.STOP)
    assert len([join for plan in driver.plans for join in plan.joins]) == 1


def test_sequences_of_two_regimes_share_no_page_and_those_of_one_do():
    driver = Driver(capacity(OUTGROWN, step_tokens=32))
    first, longer = list(range(100, 109)), list(range(100, 116))
    for prompt, cached in ((first, 0), (longer, 0), (first, 8), (longer, 12)):
        seq = driver.add(sequence(prompt, max_tokens=1))
        driver.finish()
        assert seq.prompt_cached == cached
    driver.check_answers()


def test_a_sequence_that_changes_its_regime_finds_the_pages_of_that_regime():
    driver = Driver(capacity(OUTGROWN, step_tokens=32))
    prompt = list(range(100, 112))
    driver.add(sequence(prompt + continuation(prompt, 3, layout=OUTGROWN), max_tokens=1))
    driver.finish()
    seq = driver.add(sequence(prompt, max_tokens=4))
    driver.finish()
    driver.check_answers()

    assert computed_of(driver, seq) == [(0, 12), (12, 1), (13, 1), (14, 1)]


def test_a_sequence_at_its_boundary_returns_to_its_place_and_others_continue():
    driver = Driver(capacity(OUTGROWN, step_tokens=8), depth=2)
    crossing = driver.add(sequence([1] * 11, max_tokens=4))
    beside = driver.add(sequence([2] * 3, max_tokens=12))
    later = [driver.add(sequence([3 + n] * 9, max_tokens=2)) for n in range(12)]
    driver.finish()
    driver.check_answers()

    last = {seq: max(step.plan.number for step in driver.steps if seq in step.sequences) for seq in driver.everybody}
    assert computed_of(driver, beside)[:10] == [(0, 3), *((n, 1) for n in range(3, 12))]
    assert last[crossing] < max(last[seq] for seq in later)


def test_choices_of_a_prompt_beyond_the_boundary_share_its_pages():
    driver = Driver(capacity(OUTGROWN, step_tokens=32), depth=2)
    choices = [driver.add(sequence(21, max_tokens=3, seed=n)) for n in range(3)]
    driver.finish()
    driver.check_answers()

    assert [seq.prompt_cached for seq in choices] == [0, 20, 20]


def test_pages_of_long_prompts_are_shared_where_the_prompts_are_of_one_length():
    driver = Driver(capacity(BY_PROMPT, step_tokens=32))
    text = list(range(100, 130))
    for prompt, cached in ((12, 0), (14, 0), (15, 0), (14, 12), (10, 8), (12, 8)):
        seq = driver.add(sequence(text[:prompt], max_tokens=5))
        driver.finish()
        assert seq.prompt_cached == cached, prompt
    other = driver.add(sequence([*text[:12], 7, 8], max_tokens=1))
    driver.finish()
    assert other.prompt_cached == 12
    driver.check_answers()


def test_the_next_turn_shares_nothing_with_a_long_prompt_that_it_begins_with():
    driver = Driver(capacity(BY_PROMPT, step_tokens=32))
    first = driver.add(sequence(14, max_tokens=4))
    driver.finish()
    again = driver.add(sequence([*first.tokens, 5], max_tokens=2))
    driver.finish()
    driver.check_answers()

    assert again.prompt_cached == 0


def test_a_long_prompt_that_is_preempted_keeps_its_regime():
    driver = Driver(capacity(BY_PROMPT, pages=10, max_model_len=32), depth=2)
    driver.add(sequence([1] * 13, max_tokens=9))
    late = driver.add(sequence([2] * 14, max_tokens=9))
    driver.finish()
    driver.check_answers()

    joins = [join for plan in driver.plans for join in plan.joins if join.tokens[0] == 2]
    assert driver.scheduler.preemptions
    assert {join.regime for join in joins} == {14}
    assert len(joins) > 1
    assert late.finish is FinishReason.LENGTH
