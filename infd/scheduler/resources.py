"""The limited resources that a running sequence holds.

Admission iterates over the resources without knowing their types. A further
resource (state slots, an encoder's budget) is one class, one entry of
`Scheduler.resources`, and a field of Sequence for the sequence's share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Sequence as Many

    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence


class Resource(Protocol):
    """A resource that a sequence takes when admitted, and releases when it finishes or is preempted.

    Steps run in order, so a released share may be taken in the very next plan.
    A resource defines only the methods that it needs.

    passable  whether later sequences may be admitted before an earlier sequence for which this resource lacks room
    """

    passable: ClassVar[bool] = False

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        """Return whether a waiting sequence may run in the step being planned.

        reserved  earlier sequences that cannot run until their last step is committed; their shares are reserved
        """

    def take(self, seq: Sequence, plan: StepPlan) -> None:
        """Take a sequence's share, after `fits` returned True for the sequence."""
        return

    def release(self, seq: Sequence) -> None:
        """Release the share of a running sequence."""
        return

    def settle(self, plan: StepPlan) -> None:
        """Update the accounting after a step was committed."""
        return

    def undo(self, plan: StepPlan) -> None:
        """Undo the writes and loads of a failed step. The caller has called `release` for the step's sequences."""
        return

    def verify(self, running: Collection[Sequence]) -> None:
        """Assert that the shares of all running sequences and the free share add up to the whole resource."""
        return


class RowPool(Resource):
    """Row ids 0..rows-1 of the persistent batch; each running sequence holds one row."""

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
