"""Tell a long step from a stuck one.

The device counts what it gets done, layer by layer. With steps in flight, a
count that stands still for longer than any step ever took means a hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 30.0
PATIENCE_STEPS = 20  # times the longest step so far


class Watchdog:
    """Looked at about once a second."""

    def __init__(self, pulse: Callable[[], int]) -> None:
        self.stuck = False
        self._pulse = pulse
        self._count = -1
        self._moved = 0.0
        self._longest_s = 0.0

    def took(self, seconds: float) -> None:
        """A step was committed."""
        self._longest_s = max(self._longest_s, seconds)

    def look(self, now: float, *, busy: bool) -> bool:
        """Return whether a step is stuck. `busy`: steps are in flight; now: monotonic seconds."""
        count = self._pulse()
        if count != self._count or not busy:
            self._count, self._moved = count, now
        self.stuck = now - self._moved > max(PATIENCE_S, PATIENCE_STEPS * self._longest_s)
        return self.stuck
