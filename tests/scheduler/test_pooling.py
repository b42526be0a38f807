"""A prompt that is pooled is computed to its end, in any chunks, and ends with its numbers."""

from __future__ import annotations

import pytest

from infd.request import FinishReason, Pool, Pooled
from infd.scheduler.layout import CacheLayout
from infd.scheduler.pooling import PromptPooling
from tests.fakes import capacity, pooled
from tests.scheduler.driver import Driver, granted, sequence

EMBED, BY_TOKEN = Pool("embed"), Pool("token_embed")


@pytest.mark.parametrize("pool", [EMBED, BY_TOKEN, Pool("token_classify", skip=21), Pool("embed", skip=3)])
def test_a_prompt_is_pooled_to_its_last_token_and_no_token_is_sampled(pool: Pool):
    driver = Driver(capacity(step_tokens=8))
    seq = driver.add(sequence(23, pool=pool))
    driver.finish()

    assert [(span.start, span.pools, span.samples) for plan in driver.plans for span in plan.spans] == [
        (0, 8, 0),
        (8, 8, 0),
        (16, 7, 0),
    ]
    assert (seq.finish, seq.generated) == (FinishReason.STOP, 0)
    assert driver.pooled[seq] == pooled(pool, list(seq.request.prompt), driver.capacity)


def test_a_prompt_as_long_as_the_model_reads_is_pooled():
    driver = Driver(capacity(max_model_len=12))
    seq = driver.add(sequence(12, pool=EMBED))
    driver.finish()

    assert seq in driver.pooled


@pytest.mark.parametrize(
    ("pools_last", "pool", "cached"), [(True, EMBED, 16), (False, EMBED, 0), (True, BY_TOKEN, 0), (False, BY_TOKEN, 0)]
)
def test_cached_pages_are_read_only_where_the_last_token_alone_is_pooled(pools_last: bool, pool: Pool, cached: int):
    driver = Driver(capacity(pools_last=pools_last, step_tokens=32))
    driver.add(sequence(19, max_tokens=1))
    driver.finish()
    seq = driver.add(sequence(19, pool=pool))
    driver.finish()

    assert seq.prompt_cached == cached
    driver.check_answers()


def test_pages_of_a_pooled_prompt_are_found_by_others():
    driver = Driver(capacity(step_tokens=32))
    driver.add(sequence(19, pool=EMBED))
    driver.finish()
    seq = driver.add(sequence(19, max_tokens=1))
    driver.finish()

    assert seq.prompt_cached == 16


def test_without_a_cache_whole_prompts_are_packed_into_a_step():
    driver = Driver(capacity(CacheLayout((), divisible=False), pages=0, rows=8, step_tokens=64, max_model_len=64))
    prompts = [driver.add(sequence(length, pool=EMBED)) for length in (20, 30, 9, 30, 1)]

    assert granted(driver.step()) == dict(zip(prompts[:3], (20, 30, 9), strict=True))
    assert granted(driver.step()) == dict(zip(prompts[3:], (30, 1), strict=True))
    driver.finish()
    driver.check_answers()


def test_several_whole_prompts_share_a_step_only_up_to_its_smaller_budget():
    layout = CacheLayout((), divisible=False)
    driver = Driver(capacity(layout, pages=0, step_tokens=64, max_model_len=64, mixed_tokens=32))
    long = driver.add(sequence(60, pool=EMBED, priority=-1))
    short = [driver.add(sequence(length, pool=EMBED)) for length in (12, 20, 1)]

    assert granted(driver.step()) == {long: 60}
    assert granted(driver.step()) == dict(zip(short[:2], (12, 20), strict=True))
    assert granted(driver.step()) == {short[2]: 1}


def queue(*, patience: int = 64) -> Driver:
    """A scheduler whose steps compute one prompt each."""
    layout = CacheLayout((), divisible=False)
    return Driver(capacity(layout, pages=0, rows=1, step_tokens=512, max_model_len=512), patience=patience)


def test_short_texts_go_before_long_ones_that_wait_and_equal_ones_in_order_of_arrival():
    driver = queue()
    long = [driver.add(sequence(400, pool=EMBED)) for _ in range(4)]
    started = [*granted(driver.step())]
    short = [driver.add(sequence(30, pool=EMBED)) for _ in range(3)]
    started += [next(iter(granted(driver.step()))) for _ in range(6)]

    assert started == [long[0], *short, *long[1:]]


@pytest.mark.parametrize(("patience", "most"), [(64, 512 // 32), (16, 8)])
def test_a_long_text_waits_for_short_ones_by_its_length_but_at_most_half_the_patience(patience: int, most: int):
    driver = queue(patience=patience)
    long = driver.add(sequence(512, pool=EMBED))
    passed = 0
    while long.finish is None:
        driver.add(sequence(8, pool=EMBED))
        driver.add(sequence(8, pool=EMBED))
        passed += long not in granted(driver.step())

    assert passed == most - 1


def test_a_long_text_of_an_earlier_level_of_priority_goes_before_short_ones():
    driver = queue()
    short = driver.add(sequence(8, pool=EMBED))
    long = driver.add(sequence(512, pool=EMBED, priority=-1))

    assert long in granted(driver.step())
    assert short in granted(driver.step())


def test_prompts_that_generate_are_not_ordered_by_length():
    driver = Driver(capacity(rows=1, step_tokens=64))
    long = driver.add(sequence(40, max_tokens=1))
    short = driver.add(sequence(4, max_tokens=1))

    assert long in granted(driver.step())
    assert short in granted(driver.step())


def test_a_step_that_pools_the_same_tokens_again_adds_only_unknown_rows():
    pooling = PromptPooling(Pool("token_embed", skip=1), 6)
    pooling.add(0, 3, Pooled(1, b"bbbbcccc"))
    pooling.add(3, 5, Pooled(1, b"ddddeeee"))
    pooling.add(0, 4, Pooled(1, b"bbbbccccdddd"))
    assert pooling.result is None
    pooling.add(4, 6, Pooled(1, b"eeeeffff"))

    assert pooling.result == Pooled(1, b"bbbbccccddddeeeeffff")


def test_a_result_without_numbers_fails_its_sequence_alone():
    driver = Driver()
    failed, other = driver.add(sequence(5, pool=EMBED)), driver.add(sequence(6, pool=EMBED))
    step = driver.issue()
    assert step is not None
    result = driver.device.run(step.plan)
    del result.pooled[0]
    driver.scheduler.commit(step, result)

    assert (failed.finish, other.finish) == (FinishReason.ERROR, FinishReason.STOP)
