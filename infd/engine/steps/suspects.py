"""Find the one sequence that makes a step fail.

The sequences of a failed step are tried again by halves. A half that comes as
far as the failed step wanted is cleared; one that fails is halved again, until
a sequence fails alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.scheduler.scheduler import Scheduled
    from infd.scheduler.sequence import Sequence


class Suspects:
    """Groups still to be tried: each sequence with the number of tokens it must get to."""

    def __init__(self) -> None:
        self._groups: list[dict[Sequence, int]] = []

    @property
    def on_trial(self) -> dict[Sequence, int] | None:
        """The group that alone may be planned now, or None if nobody is suspected."""
        while self._groups:
            group = {seq: goal for seq, goal in self._groups[-1].items() if seq.finish is None and seq.computed < goal}
            if group:
                self._groups[-1] = group
                return group
            self._groups.pop()
        return None

    def accuse(self, step: Scheduled) -> Sequence | None:
        """Take in a failed step. Return the culprit if it was alone; it is then no longer suspected."""
        spans = zip(step.sequences, step.plan.spans, strict=True)
        group = {seq: span.start + span.count for seq, span in spans if seq.finish is None}
        if self._groups:
            self._groups[-1] = {seq: goal for seq, goal in self._groups[-1].items() if seq not in group}
        if len(group) == 1:
            return next(iter(group))
        suspects = list(group.items())
        half = len(suspects) // 2
        self._groups += [dict(suspects[half:]), dict(suspects[:half])]
        return None

    def dismiss(self) -> None:
        """Stop suspecting the group on trial: it cannot be tried alone."""
        self._groups.pop()
