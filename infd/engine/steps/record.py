"""Keep account of the steps: how many there were, when the last one ended, whether one hangs, whether pages add up."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from infd.engine.steps.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.engine.steps.loop import Issued
    from infd.engine.streams.request_metrics import RequestMetrics
    from infd.scheduler.scheduler import Outcome, Scheduler

log = logging.getLogger("infd.engine")


class StepRecord:
    """Told of every step that is committed, and looked at about once a second.

    steps      how many were committed
    last_time  when the last of them was, in Unix time; 0 before there was one
    """

    def __init__(self, pulse: Callable[[], int], measure: RequestMetrics, clock: Callable[[], float]) -> None:
        self.steps = 0
        self.last_time = 0.0
        self._last: float | None = None  # in the clock's seconds
        self._verified = 0  # steps, when the cache was last checked
        self._progress = Watchdog(pulse)
        self._measure = measure
        self._clock = clock

    def committed(self, issued: Issued, outcomes: Sequence[Outcome], scheduler: Scheduler) -> None:
        self.steps += 1
        self._last, self.last_time = self._clock(), time.time()
        self._measure.committed(issued, outcomes, scheduler, self._last)
        self._progress.took(self._last - issued.at)

    @property
    def age_s(self) -> float | None:
        """How long ago the last step was committed."""
        return None if self._last is None else self._clock() - self._last

    @property
    def stuck(self) -> bool:
        """Whether a step was stuck when `look` was last called."""
        return self._progress.stuck

    def look(self, *, busy: bool) -> bool:
        """Look whether a step is stuck, where the device is `busy`. True when one is found, once for each time."""
        known = self.stuck
        return self._progress.look(self._clock(), busy=busy) and not known

    def verify(self, scheduler: Scheduler) -> None:
        """Check every page and row, of which nobody may hold any, if there were steps since the last time."""
        if self._verified == self.steps:
            return
        self._verified = self.steps
        try:
            scheduler.verify()
            assert not scheduler.cache.pool.referenced, "pages are held by nobody"
        except AssertionError:
            log.critical("the cache's accounts are wrong; please report this", exc_info=True)
