"""The bounds of the queue, and each tenant's share of a full one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from infd.config import Config, LiveConfig, SchedulerConfig
from infd.engine.admission.budget import QueueBudget
from infd.errors import Overloaded
from infd.request import Tenant

FLOOD, ANN, BOB = Tenant("flood"), Tenant("ann"), Tenant("bob", share=2.0)


def budget(choices: int = 8, tokens: int = 1000) -> QueueBudget:
    return QueueBudget(LiveConfig(Config(scheduler=SchedulerConfig(max_waiting=choices, max_waiting_tokens=tokens))))


def refuses(refused: bool):
    return pytest.raises(Overloaded) if refused else nullcontext()


def test_a_queue_filled_by_one_tenant_refuses_that_tenant_and_takes_others_up_to_their_share():
    queue = budget(choices=8)
    queue.reserve(8, 0, FLOOD)
    with refuses(True):
        queue.require(1, 0, 0, FLOOD)
    for taken in range(5):
        with refuses(taken >= 4):
            queue.require(1, 0, 0, ANN)
            queue.reserve(1, 0, ANN)
    with refuses(True):
        queue.require(5, 0, 0, BOB)  # of the shares 1, 1 and 2 it has half
    queue.require(4, 0, 0, BOB)


def test_without_another_tenant_the_bound_is_the_bound():
    queue = budget(choices=8)
    queue.require(8, 0, 0, ANN)
    with refuses(True):
        queue.require(1, 0, 8, ANN)  # all of it is queued, preempted sequences too
    queue.reserve(8, 0, ANN)
    with refuses(True):
        queue.require(1, 0, 0, ANN)


def test_prompt_tokens_are_shared_too_and_a_sequence_that_leaves_the_queue_makes_room():
    queue = budget(tokens=1000)
    queue.enqueue(FLOOD, 1000)
    with refuses(True):
        queue.require(1, 1, 1, FLOOD)
    reservation = queue.reserve(1, 400, ANN)
    queue.exchange(reservation, 1, 500)
    queue.enqueue(ANN, 500)
    with refuses(True):
        queue.require(1, 1, 2, ANN)
    queue.dequeue(ANN, 500)
    queue.require(1, 500, 1, ANN)
    queue.dequeue(FLOOD, 1000)
    queue.require(1, 1000, 0, FLOOD)
    assert queue.queued_tokens == queue.reserved_choices == 0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def filled(clock: Clock, *, every_s: float, count: int, tokens: int = 0) -> QueueBudget:
    """Return a full queue of 8 choices from which `count` have left, and been replaced, one each `every_s`."""
    live = LiveConfig(Config(scheduler=SchedulerConfig(max_waiting=8, max_waiting_tokens=8 * tokens or 1000)))
    queue = QueueBudget(live, clock)
    for _ in range(8):
        queue.enqueue(ANN, tokens)
    for _ in range(count):
        clock.now += every_s
        queue.dequeue(ANN, tokens)
        queue.enqueue(ANN, tokens)
    clock.now += every_s / 2  # a refusal comes at any time between two departures
    return queue


def retry_after_s(queue: QueueBudget, choices: int = 1, tokens: int = 0) -> int | None:
    with pytest.raises(Overloaded) as refused:
        queue.require(choices, tokens, 8 if choices else 0, ANN)
    return refused.value.retry_after_s


@pytest.mark.parametrize(("every_s", "choices", "expected"), [(7.4, 1, 8), (7.4, 4, 30), (0.1, 4, 1), (50.0, 4, 60)])
def test_a_refusal_names_the_time_in_which_places_become_free(every_s: float, choices: int, expected: int):
    assert retry_after_s(filled(Clock(), every_s=every_s, count=20), choices) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, 7), (3, 6), (100, 5)])
def test_the_rate_is_about_right_from_the_first_departure_on(count: int, expected: int):
    assert retry_after_s(filled(Clock(), every_s=4.5, count=count)) == expected


def test_an_idle_hour_leaves_the_rate_as_it_was_and_a_queue_that_stalls_is_waited_for_longer():
    clock = Clock()
    queue = filled(clock, every_s=4.5, count=50)
    for _ in range(8):
        queue.dequeue(ANN, 0)
    clock.now += 3600
    for _ in range(8):
        queue.enqueue(ANN, 0)
    assert retry_after_s(queue) in (2, 3, 4), "eight have left at once"
    clock.now += 60
    assert (retry_after_s(queue) or 0) > 10
    clock.now += 3600
    assert retry_after_s(queue) == 60, "clients ignore more"


def test_before_anything_has_left_the_wait_is_as_long_as_the_queues_own():
    clock = Clock()
    queue = filled(clock, every_s=1.0, count=0)
    assert retry_after_s(queue) == 1
    clock.now += 11
    assert 8 < (retry_after_s(queue) or 0) <= 12


def test_prompt_tokens_beyond_the_bound_are_waited_for_at_the_rate_of_tokens():
    queue = filled(Clock(), every_s=2.0, count=20, tokens=100)
    assert retry_after_s(queue, choices=0, tokens=430) == 9  # 50 a second
