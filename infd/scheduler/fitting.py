"""Decide how many tokens a step may hold: beside streams that wait for it, and after one has not fitted into memory."""

from __future__ import annotations

from typing import Final

CALM_STEPS: Final = 64  # that must fit before larger ones are tried again
CROWD: Final = 8  # who wait for their first token are few up to here


class StepSize:
    """At most `largest` tokens; half of a step that did not fit, and twice as many again after a calm while.

    mixed  as many already take as long as a stream should wait for a step
    """

    def __init__(self, largest: int, mixed: int | None = None) -> None:
        self.tokens = largest
        self._largest = largest
        self._mixed = mixed or largest
        self._calm = 0  # steps that have fitted since one did not

    def beside(self, streams: int, waiting: int) -> int:
        """Return how many tokens of prompts a step may hold in which so many streams go on, if there is room.

        waiting  who wait for their first token, and could have it

        They may fill up the step to `mixed`, and where that leaves them little, make it half as long again. A crowd may
        have all of it: a stream waits for one step, they for all of them, and larger ones cost less a token.
        """
        if not streams or waiting > CROWD:
            return self.tokens
        return max(self._mixed - streams, (self._mixed + streams) // 2)

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
