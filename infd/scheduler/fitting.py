"""Decide how many tokens a step may hold, after one has not fitted into the device's memory."""

from __future__ import annotations

from typing import Final

CALM_STEPS: Final = 64  # that must fit before larger ones are tried again


class StepSize:
    """At most `largest` tokens; half of a step that did not fit, and twice as many again after a calm while."""

    def __init__(self, largest: int) -> None:
        self.tokens = largest
        self._largest = largest
        self._calm = 0  # steps that have fitted since one did not

    def shrink(self, tokens: int) -> None:
        """A step that counted as so many tokens, two at least, did not fit."""
        self.tokens = min(tokens, self.tokens) // 2
        self._calm = 0

    def fitted(self) -> None:
        """A step has fitted."""
        if self.tokens == self._largest:
            return
        self._calm += 1
        if self._calm >= CALM_STEPS:
            self.tokens = min(2 * self.tokens, self._largest)
            self._calm = 0
