"""Hand results to their readers without holding up the loop.

Delivering, which mostly includes the write to the reader's socket, is bounded
work per call: past about a millisecond the rest waits until the loop has served
everybody else.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.scheduler.scheduler import Outcome

BUDGET_S = 0.001
log = logging.getLogger("infd.engine")


class FanOut:
    """Outcomes on their way to streams, in the order committed."""

    def __init__(self, deliver: Callable[[Outcome, float], None], clock: Callable[[], float]) -> None:
        """deliver: given an outcome and the time on the clock, in seconds."""
        self._deliver = deliver
        self._clock = clock
        self._queue: deque[Outcome] = deque()
        self._posted = False

    def post(self, outcomes: list[Outcome]) -> None:
        self._queue.extend(outcomes)
        if self._queue and not self._posted:
            self._posted = True
            asyncio.get_running_loop().call_soon(self._drain)

    def flush(self) -> None:
        """Deliver all that is left at once: nothing may come after it."""
        self._hand_over(math.inf)

    def _drain(self) -> None:
        self._hand_over(BUDGET_S)
        self._posted = bool(self._queue)
        if self._posted:
            asyncio.get_running_loop().call_soon(self._drain)

    def _hand_over(self, budget_s: float) -> None:
        """Deliver what there is, or as much of it as the budget allows: at least one outcome."""
        queue, deliver, clock = self._queue, self._deliver, self._clock
        now = clock()
        until = now + budget_s
        while queue and now <= until:
            outcome = queue.popleft()
            try:
                deliver(outcome, now)
            except Exception:
                # Named fault point "push". The reader of this one stream gets an error; the others go on.
                log.exception("delivering to %s failed", outcome.seq)
            now = clock()
