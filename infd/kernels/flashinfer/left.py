"""The cases that a FlashInfer family delegates to Triton."""

from __future__ import annotations


class Left:
    """Records each delegated case once, as it occurs, for operators.

    refused  the family's `Selected.refused`; grows with each new case
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._met: dict[str, None] = {}

    def note(self, what: str) -> None:
        """Record that the case `what` was delegated."""
        if what not in self._met:
            self._met[what] = None
            self.refused["flashinfer"] = f"leaves to triton: {'; '.join(self._met)}"
