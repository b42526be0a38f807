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


def test_prompt_tokens_are_shared_too_and_what_leaves_the_queue_makes_room():
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
