"""Record the steps: their number, the last step's time, whether a step is stuck, whether pages leak."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from infd.engine.steps.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.engine.steps.loop import Issued
    from infd.engine.telemetry import Telemetry
    from infd.scheduler.scheduler import Outcome, Scheduler

log = logging.getLogger("infd.engine")


class StepRecord:
    """Counts committed steps, and detects stuck steps and leaked pages.

    steps      committed so far
    last_time  Unix time of the last commit; 0 before the first
    """

    def __init__(self, scheduler: Scheduler, pulse: Callable[[], int], telemetry: Telemetry) -> None:
        self.steps = 0
        self.last_time = 0.0
        self._last: float | None = None  # time of the last commit, monotonic seconds
        self._verified = 0  # `steps` when the cache was last verified
        self._scheduler = scheduler
        self._watchdog = Watchdog(pulse)
        self._metrics = telemetry.metrics
        self._metrics.expert_loads = scheduler.expert_loads
        self._now = telemetry.now

    def committed(self, issued: Issued, outcomes: Sequence[Outcome]) -> None:
        """Count a step.

        `iteration_tokens` counts as vLLM 0.33 does: steps without an outcome are ignored, and all computed tokens of a
        prompt count in the step that samples the choice's first token.
        """
        now = self._now()
        # A step that was issued while another was computed began when that one ended.
        took = now - (issued.at if self._last is None else max(issued.at, self._last))
        self.steps += 1
        self._last, self.last_time = now, time.time()
        self._watchdog.record_duration(took)
        metrics, scheduler = self._metrics, self._scheduler
        metrics.step.observe(took)
        metrics.step_tokens.observe(issued.step.plan.tokens)
        if outcomes:
            metrics.iteration_tokens.observe(sum(outcome.prompt_computed + len(outcome.tokens) for outcome in outcomes))
        metrics.preemptions, metrics.steps_undone = scheduler.preemptions, scheduler.undone
        metrics.prefix_queries, metrics.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        speculation = scheduler.speculation
        metrics.drafts, metrics.drafted = speculation.drafts, speculation.drafted
        metrics.accepted_drafts = tuple(speculation.accepted)

    @property
    def age_s(self) -> float | None:
        """Seconds since the last step was committed; None before the first."""
        return None if self._last is None else self._now() - self._last

    @property
    def stuck(self) -> bool:
        """Whether a step was stuck at the last `check`."""
        return self._watchdog.stuck

    def check(self, *, busy: bool) -> bool:
        """Check whether a step is stuck. Returns True once for each stuck step.

        busy  whether the device has work
        """
        known = self.stuck
        return self._watchdog.check(self._now(), busy=busy) and not known

    def verify_idle(self) -> None:
        """Verify the scheduler's invariants, and that no page is referenced; log a violation as critical.

        Called while no choice is in flight. Does nothing if no step was committed since the last call.
        """
        if self._verified == self.steps:
            return
        self._verified = self.steps
        try:
            self._scheduler.verify()
            assert not self._scheduler.cache.pool.referenced, "pages are held by nobody"
        except AssertionError:
            log.critical("the cache's page counts are inconsistent; please report this", exc_info=True)
