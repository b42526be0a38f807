"""Due times of requests, in seconds from the run's begin."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def arrivals(rate: float, burstiness: float, count: int, seed: int | str) -> list[float]:
    """Return arrivals whose intervals are gamma-distributed with mean 1 / rate; the first is at 0.

    burstiness  the distribution's shape: 1 is a Poisson process, less comes in bursts, more is regular
    """
    rng = random.Random(f"arrivals {seed}")  # noqa: S311 - reproducible, not secret
    due_s, now = [], 0.0
    for _ in range(count):
        due_s.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return due_s


def replayed(times_s: Sequence[float], scale: float) -> list[float]:
    """Return a trace's times from its first request on, multiplied by `scale`."""
    first = min(times_s, default=0.0)
    return [(time_s - first) * scale for time_s in times_s]
