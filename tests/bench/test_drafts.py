"""The bound of n-grams: drafts chosen in hindsight."""

from __future__ import annotations

import pytest
from drafts import MOST, bound, repeated

from infd.scheduler.step_costs import StepCosts


@pytest.mark.parametrize(
    ("prompt", "reply", "expected"),
    [
        ([1, 2, 3, 9], [1, 2, 3, 4], [2, 1, 0]),
        ([1, 5, 1, 2, 8], [1, 2, 3, 1, 5], [1, 0, 0, 1]),  # an older occurrence, where it is the better one
        ([5], [7, 7, 7, 7, 7], [0, 3, 2, 1]),  # a continuation that repeats itself
        ([1, *range(20, 40)], [1, *range(20, 40)], [min(MOST, left) for left in range(20, 0, -1)]),
    ],
)
def test_as_many_tokens_may_be_drafted_as_the_best_earlier_occurrence_continues(prompt, reply, expected) -> None:
    assert repeated(prompt, reply) == expected


def test_the_bound_drafts_fewer_tokens_where_more_rows_cost_more_than_they_save() -> None:
    prompt, reply = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]
    assert bound(prompt, reply, StepCosts(())) == 1
    assert bound(prompt, reply, StepCosts(((1, 1.0), (2, 1.0), (3, 3.0), (4, 9.0)))) == 2
    assert bound([9], reply, StepCosts(())) == 4
