"""Hand results to their readers without holding up the loop.

Delivering is bounded work per call: past about a millisecond the rest waits
until the loop has served everybody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.scheduler.scheduler import Outcome

BUDGET_S = 0.001
log = logging.getLogger("infd.engine")


class FanOut:
    """Outcomes on their way to streams, in the order committed."""

    def __init__(self, deliver: Callable[[Outcome], None]) -> None:
        self._deliver = deliver
        self._queue: deque[Outcome] = deque()
        self._posted = False

    def post(self, outcomes: list[Outcome]) -> None:
        self._queue.extend(outcomes)
        if self._queue and not self._posted:
            self._posted = True
            asyncio.get_running_loop().call_soon(self._drain)

    def flush(self) -> None:
        """Deliver all that is left at once: nothing may come after it."""
        while self._queue:
            self._hand_over(self._queue.popleft())

    def _drain(self) -> None:
        queue, started = self._queue, perf_counter()
        while queue:
            self._hand_over(queue.popleft())
            if perf_counter() - started > BUDGET_S and queue:
                asyncio.get_running_loop().call_soon(self._drain)
                return
        self._posted = False

    def _hand_over(self, outcome: Outcome) -> None:
        try:
            self._deliver(outcome)
        except Exception:
            # Named fault point "push". The reader of this one stream gets an error; the others go on.
            log.exception("delivering to %s failed", outcome.seq)
