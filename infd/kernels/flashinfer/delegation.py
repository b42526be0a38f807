"""The cases that a FlashInfer family delegates to Triton."""

from __future__ import annotations


class Delegation:
    """Records each delegated case once, as it occurs, for operators.

    refused  the family's `Selected.refused`, updated at each new case
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._met: dict[str, None] = {}

    def note(self, case: str) -> None:
        """Record that `case` was delegated."""
        if case not in self._met:
            self._met[case] = None
            self.refused["flashinfer"] = f"delegates to triton: {'; '.join(self._met)}"
