"""Measure how fast the queue empties, for the Retry-After of refused requests."""

from __future__ import annotations

from math import ceil, exp
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S: Final = 30.0  # time constant of the averages
LONGEST_S: Final = 60  # the openai package ignores a longer Retry-After


class Turnover:
    """The rate at which choices or tokens leave the queue, while any wait.

    The amounts that left, and the time during which something waited, decay at one rate. So the estimate is right from
    the first departure on, and idle time before a burst does not count.
    """

    __slots__ = ("_amount", "_at", "_now", "_time_s", "_waiting")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._amount = 0.0  # decayed sum of the amounts that left
        self._time_s = 0.0  # decayed time in which something waited
        self._waiting = 0.0
        self._at = 0.0

    def enter(self, amount: float) -> None:
        self._advance()
        self._waiting += amount

    def leave(self, amount: float) -> None:
        self._advance()
        self._waiting -= amount
        self._amount += amount

    def wait_s(self, amount: float) -> int:
        """Return the whole seconds, from 1 to LONGEST_S, after which `amount` will have left at the present rate.

        Until the first departure: as long as the queue has waited.
        """
        self._advance()
        expected_s = self._time_s * amount / self._amount if self._amount else self._time_s
        return min(max(1, ceil(expected_s)), LONGEST_S)

    def _advance(self) -> None:
        now = self._now()
        if self._waiting > 0:
            decay = exp((self._at - now) / WINDOW_S)
            self._amount *= decay
            self._time_s = WINDOW_S + (self._time_s - WINDOW_S) * decay
        self._at = now
