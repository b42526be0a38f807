"""Find the sequence that makes a step fail, by bisection.

The sequences of a failed step run again in halves. If a half computes its spans
of the failed step without an error, its sequences are cleared. If a half fails,
it is split again, until a sequence fails alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.scheduler.scheduler import Scheduled
    from infd.scheduler.sequence import Sequence


class Suspects:
    """Groups of sequences to run again, each sequence with the number of computed tokens at which it is cleared."""

    def __init__(self) -> None:
        self._groups: list[dict[Sequence, int]] = []

    @property
    def current_group(self) -> dict[Sequence, int] | None:
        """The only sequences that may be planned now; None if none are suspected."""
        while self._groups:
            group = {seq: goal for seq, goal in self._groups[-1].items() if seq.finish is None and seq.computed < goal}
            if group:
                self._groups[-1] = group
                return group
            self._groups.pop()
        return None

    def bisect(self, step: Scheduled) -> Sequence | None:
        """Suspect the sequences of a failed step, and return None. If the step computed only one, return that sequence.

        A sequence that is left because the step's other sequences have ended by now is not proven to be the culprit.
        """
        spans = zip(step.sequences, step.plan.spans, strict=True)
        group = {seq: span.start + span.count - span.drafts for seq, span in spans if seq.finish is None}
        if self._groups:
            self._groups[-1] = {seq: goal for seq, goal in self._groups[-1].items() if seq not in group}
        if len(group) == len(step.sequences) == 1:
            return next(iter(group))
        suspects = list(group.items())
        half = len(suspects) // 2
        self._groups += [dict(suspects[half:]), dict(suspects[:half])]
        return None

    def clear_group(self) -> None:
        """Clear the current group. Called when no step can be planned for the sequences of the group alone."""
        self._groups.pop()
