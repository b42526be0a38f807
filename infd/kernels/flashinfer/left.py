"""What FlashInfer's kernels of one family leave to Triton's."""

from __future__ import annotations


class Left:
    """Noted as it is met, once each, for operators to see.

    refused  what `Selected.refused` says of FlashInfer; it grows
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._met: dict[str, None] = {}

    def note(self, what: str) -> None:
        if what not in self._met:
            self._met[what] = None
            self.refused["flashinfer"] = f"leaves to triton: {'; '.join(self._met)}"
