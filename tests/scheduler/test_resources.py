"""Admission knows no resource by name: a further resource changes no line of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.request import FinishReason
from infd.scheduler.resources import Resource
from tests.fakes import capacity
from tests.scheduler.driver import Driver, granted, sequence

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Many

    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence


class Permits(Resource):
    """Sequences with a seed need the only permit."""

    def __init__(self, *, passable: bool = False) -> None:
        self.passable = passable  # type: ignore[misc]
        self.holders: list[Sequence] = []
        self.undone: list[int] = []

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        return not seq.seed or not self.holders

    def take(self, seq: Sequence, plan: StepPlan) -> None:
        if seq.seed:
            self.holders.append(seq)

    def release(self, seq: Sequence) -> None:
        if seq.seed:
            self.holders.remove(seq)

    def undo(self, plan: StepPlan) -> None:
        self.undone.append(plan.number)

    def verify(self, running: Collection[Sequence]) -> None:
        assert self.holders == [seq for seq in running if seq.seed]


def driving(permits: Permits, *, depth: int = 1) -> Driver:
    driver = Driver(capacity(step_tokens=32), depth=depth)
    driver.scheduler.resources += (permits,)
    return driver


def test_a_sequence_waits_for_a_resource_and_later_ones_wait_too():
    driver = driving(Permits())
    first, second = (driver.add(sequence([seed] * 3, seed=seed)) for seed in (1, 2))
    behind = driver.add(sequence([5] * 3))

    assert granted(driver.step()) == {first: 3}
    assert (second.row, behind.row) == (None, None)
    driver.finish()
    driver.check_answers()


def test_sequences_that_fit_pass_one_that_waits_for_a_passable_resource():
    driver = driving(Permits(passable=True))
    first, second = (driver.add(sequence([seed] * 3, seed=seed)) for seed in (1, 2))
    behind = driver.add(sequence([5] * 3))

    assert granted(driver.step()) == {first: 3, behind: 3}
    driver.finish()
    assert second.finish is FinishReason.LENGTH
    driver.check_answers()


def test_a_sequences_resources_are_released_when_it_is_removed_or_held_or_its_step_fails():
    permits = Permits()
    driver = driving(permits, depth=2)
    seqs = [driver.add(sequence([seed] * 3, seed=seed)) for seed in (1, 2, 3)]
    driver.issue()
    driver.scheduler.remove(seqs[0], FinishReason.ABORT)
    driver.issue()
    assert permits.holders == [seqs[1]]
    driver.scheduler.hold(seqs[1])
    assert permits.holders == []
    driver.complete()
    driver.issue()
    assert permits.holders == [seqs[2]]
    driver.fail()
    assert (permits.holders, permits.undone) == ([], [1, 2])
    driver.scheduler.resume(seqs[1])
    driver.finish()
    driver.check_answers()
