"""Decide how many tokens a step may hold: beside streams that wait for it, and after one has not fitted into memory."""

from __future__ import annotations

from typing import Final

CALM_STEPS: Final = 64  # that must fit before larger ones are tried again
CROWD: Final = 8  # requests that wait for their first token: up to here they are few


class StepSize:
    """At most `largest` tokens; half of a step that did not fit, and twice as many again after a calm while.

    mixed    as many already take as long as a stream should wait for a step
    crowded  the same where more than CROWD requests wait for their first token
    """

    def __init__(self, largest: int, mixed: int | None = None, crowded: int | None = None) -> None:
        self.tokens = largest
        self._largest = largest
        self._mixed = mixed or largest
        self._crowded = crowded or self._mixed
        self._calm = 0  # steps that have fitted since one did not

    def beside(self, streams: int, prompts: int) -> int:
        """Return how many tokens of prompts a step may hold in which so many streams go on, if there is room.

        prompts  requests that wait for their first token, and could be computed

        They may fill up the step, and where that leaves them little, make it half as long again. A stream waits for one
        step, a crowd of prompts for all that are to come, and larger ones cost less a token.
        """
        if not streams:
            return self.tokens
        size = self._crowded if prompts > CROWD else self._mixed
        return max(size - streams, (size + streams) // 2)

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
