"""Count the device thread's progress, so that a watchdog can distinguish a long step from a stuck step.

The thread calls `beat` between layers, and between pieces of a checkpoint. Each call is also a cancellation point.
"""

from __future__ import annotations


class Stopped(BaseException):
    """Ends the device thread. A BaseException, so that handlers of Exception do not catch it."""


class Pulse:
    """A counter that one thread increments, and that any thread may read."""

    def __init__(self) -> None:
        self.count = 0
        self._stopped = False

    def beat(self, *_: object) -> None:
        """Count one piece of work. Raises Stopped after `stop`. Arguments, as of a progress callback, are ignored."""
        if self._stopped:
            raise Stopped
        self.count += 1

    def stop(self) -> None:
        """Make the next beat raise Stopped; safe from any thread."""
        self._stopped = True
