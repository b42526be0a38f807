"""Tell a long step from a stuck one.

The device counts its progress, layer by layer. If that count does not move for
longer than any step ever took, while steps are in flight, a step is stuck.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 30.0
PATIENCE_STEPS = 20  # times the longest step so far


class Watchdog:
    """Checked about once a second."""

    def __init__(self, pulse: Callable[[], int]) -> None:
        """pulse: the device's count, see Executor.pulse."""
        self.stuck = False
        self._pulse = pulse
        self._count = -1
        self._moved = 0.0
        self._longest_s = 0.0

    def took(self, seconds: float) -> None:
        """A step was committed."""
        self._longest_s = max(self._longest_s, seconds)

    def check(self, now: float, *, busy: bool) -> bool:
        """Return whether a step is stuck.

        now   monotonic seconds
        busy  whether the device has work
        """
        count = self._pulse()
        if count != self._count or not busy:
            self._count, self._moved = count, now
        self.stuck = now - self._moved > max(PATIENCE_S, PATIENCE_STEPS * self._longest_s)
        return self.stuck
