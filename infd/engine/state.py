"""The one place that says what the daemon is doing."""

from __future__ import annotations

import time
from enum import Enum


class State(Enum):
    """Reported alike by health checks, metrics, systemd's STATUS and infdctl."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    FAILED = "failed"


class Lifecycle:
    """The current state, why, and since when."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.reason = ""
        self.since = time.time()

    def enter(self, state: State, reason: str = "") -> None:
        if state is not self.state:
            self.since = time.time()
        self.state, self.reason = state, reason
