"""Count the device thread's progress, so that a watchdog can distinguish a long step from a stuck step.

Each beat, between two layers or two pieces of a checkpoint, is also a
cancellation point.
"""

from __future__ import annotations


class Stopped(BaseException):
    """Ends the device thread. A BaseException, so that no error handler catches it."""


class Pulse:
    """A count that one thread increments and any thread may read."""

    def __init__(self) -> None:
        self.count = 0
        self._stopped = False

    def beat(self, *_: object) -> None:
        """Count one piece of work. Raises Stopped after `stop`. Ignores the arguments of progress callbacks."""
        if self._stopped:
            raise Stopped
        self.count += 1

    def stop(self) -> None:
        """Make the next beat raise Stopped; safe from any thread."""
        self._stopped = True
