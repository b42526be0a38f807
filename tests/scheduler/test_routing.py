"""The experts of a sequence's tokens are reported whole: after chunks, preemptions, holds, and without cached pages."""

from __future__ import annotations

import pytest

from infd.request import FinishReason, RoutedExperts
from infd.scheduler.routing import Routing
from tests.fakes import capacity, continuation, routed
from tests.scheduler.driver import Driver, sequence


@pytest.mark.parametrize("depth", [1, 2])
def test_every_token_but_the_last_has_its_experts(depth: int):
    driver = Driver(capacity(step_tokens=8), depth=depth)
    end = continuation(list(range(100, 123)), 3)[-1]
    long = driver.add(sequence(23, max_tokens=5, route=True))
    stopped = driver.add(sequence(23, max_tokens=5, route=True, end_ids=frozenset({end})))
    driver.finish()
    driver.check_answers()

    assert stopped.finish is FinishReason.STOP
    for seq, generated in ((long, 5), (stopped, 3)):
        assert seq.routing is not None
        report = seq.routing.report(generated)
        assert report is not None
        assert report.tokens == 23 + generated - 1
        assert report.values == routed(seq.tokens[:-1], 23)


def test_a_stop_string_that_ends_earlier_cuts_the_experts():
    driver = Driver()
    seq = driver.add(sequence(9, max_tokens=6, route=True))
    driver.finish()

    assert seq.routing is not None
    report = seq.routing.report(2)
    assert report is not None
    assert report.values == routed(seq.tokens[:10], 9)


def test_cached_pages_are_not_read_and_the_pages_are_found_by_others():
    driver = Driver(capacity(step_tokens=32))
    first, seq, after = (sequence(19, max_tokens=2, route=route) for route in (False, True, False))
    for each in (first, seq, after):
        driver.add(each)
        driver.finish()
    driver.check_answers()

    assert [each.prompt_cached for each in (first, seq, after)] == [0, 0, 16]


def test_a_scored_prompt_reads_no_cached_page_even_after_its_scores_are_known():
    driver = Driver(capacity(step_tokens=32))
    seq = driver.add(sequence(19, max_tokens=9, scored=0, route=True))
    while seq.generated < 3:
        driver.step()
    driver.scheduler.preempt(seq)
    driver.finish()
    driver.check_answers()

    assert sum(span.routes for plan in driver.plans for span in plan.spans) > 2 * 19


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_or_held_sequence_reports_each_token_once(depth: int):
    driver = Driver(capacity(step_tokens=8), depth=depth)
    seq = driver.add(sequence(13, max_tokens=9, route=True))
    while seq.generated < 2:
        driver.step()
    driver.scheduler.preempt(seq)
    while seq.generated < 5:
        driver.step()
    driver.scheduler.hold(seq)
    driver.step()
    driver.scheduler.resume(seq)
    driver.finish()
    driver.check_answers()

    assert seq.generated == 9


def test_a_sequence_without_a_computed_token_has_no_report():
    assert Routing(3).report(0) is None


def test_tokens_that_are_known_are_not_appended_again():
    routing = Routing(4)
    routing.add(0, RoutedExperts(1, 1, bytes([1, 0, 2, 0])))
    routing.add(0, RoutedExperts(1, 1, bytes([9, 9, 9, 9, 3, 0])))

    assert routing.report(0) == RoutedExperts(1, 1, bytes([1, 0, 2, 0, 3, 0]))
