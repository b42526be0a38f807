"""What a sequence needs to run, of which there is only so much.

Admission asks each resource in turn and knows none of them by name. A further
resource (state slots, an encoder's budget) is one class, one entry of
`Scheduler.resources`, and a field of Sequence for what was taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Many

    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence


class Resource(Protocol):
    """Taken when a sequence is admitted, released when it finishes or is preempted.

    Steps run in order, so what is released may be taken in the very next plan.

    A verb that means nothing to a resource is left out of its class.

    passable  whether sequences that fit may be admitted before an earlier one that this resource has no room for
    """

    passable: ClassVar[bool] = False

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        """Say whether a waiting sequence may run in the step being planned.

        reserved  earlier sequences that wait for their last step to commit: leave them what they will take
        """

    def take(self, seq: Sequence, plan: StepPlan) -> None:
        """Give a sequence, for which `fits` has just been true, what it holds while it runs."""
        return

    def release(self, seq: Sequence) -> None:
        """Take back what a running sequence holds."""
        return

    def settle(self, plan: StepPlan) -> None:
        """Note that a step was committed."""
        return

    def undo(self, plan: StepPlan) -> None:
        """Forget what a failed step was to write or load. Its sequences have been released."""
        return

    def verify(self, running: Collection[Sequence]) -> None:
        """Assert that the running sequences hold all that is not free."""
        return


class RowPool(Resource):
    """Row ids 0..rows-1 of the persistent batch; each running sequence holds one."""

    def __init__(self, rows: int) -> None:
        self.total = rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        return len(self._free) > len(reserved)

    def take(self, seq: Sequence, plan: StepPlan) -> None:
        seq.row = self._free.pop()

    def release(self, seq: Sequence) -> None:
        assert seq.row is not None
        self._free.append(seq.row)
        seq.row = None

    def verify(self, running: Collection[Sequence]) -> None:
        held = [seq.row for seq in running if seq.row is not None]
        assert sorted(self._free + held) == list(range(self.total)), "a row is lost or held twice"
