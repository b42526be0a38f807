"""Count what the device thread gets done, so that a watchdog can tell a long step from a stuck one.

The same beat is where the thread can be stopped: between two layers, or between
two pieces of a checkpoint.
"""

from __future__ import annotations


class Stopped(BaseException):
    """The device thread is to end now. No handler of errors has any business with it."""


class Pulse:
    """A count that one thread raises and any thread may read."""

    def __init__(self) -> None:
        self.count = 0
        self._stopped = False

    def beat(self, *_: object) -> None:
        """Count one piece of work; what a progress callback is told is ignored. Raises Stopped after `stop`."""
        if self._stopped:
            raise Stopped
        self.count += 1

    def stop(self) -> None:
        """Let the next beat raise; safe from any thread."""
        self._stopped = True
