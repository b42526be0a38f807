"""Count the device thread's progress, so that a watchdog can distinguish a long step from a stuck step.

The thread calls `beat` between layers, and between pieces of a checkpoint. Each call is also a cancellation point.
Native code that computes a whole step beats in `memory`.
"""

from __future__ import annotations

import ctypes


class Stopped(BaseException):
    """Ends the device thread. A BaseException, so that handlers of Exception do not catch it."""


class Pulse:
    """A counter that one thread increments, and that any thread may read.

    memory  two integers: the count, and whether the next beat raises Stopped
    """

    def __init__(self) -> None:
        self.memory = (ctypes.c_int64 * 2)()

    @property
    def count(self) -> int:
        return self.memory[0]

    def beat(self, *_: object) -> None:
        """Count one piece of work. Raises Stopped after `stop`. Arguments, as of a progress callback, are ignored."""
        if self.memory[1]:
            raise Stopped
        self.memory[0] += 1

    def stop(self) -> None:
        """Make the next beat raise Stopped; safe from any thread."""
        self.memory[1] = 1
