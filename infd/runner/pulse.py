"""Count what the device thread gets done, so that a watchdog can tell a long step from a stuck one.

The same beat is where the thread can be stopped: between two layers, or between
two pieces of a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.ops import Attention, AttentionBatch, AttentionPlan, KeyValuePages


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


class Beating(Struct, frozen=True):
    """An attention family that beats once per layer: every layer that keeps a cache passes here."""

    attention: Attention
    pulse: Pulse

    def prepare(self, batch: AttentionBatch) -> AttentionPlan:
        return BeatingPlan(self.attention.prepare(batch), self.pulse)


class BeatingPlan(Struct, frozen=True):
    plan: AttentionPlan
    pulse: Pulse

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        self.plan.write(k, v, pages)

    def run(self, q: Tensor, pages: KeyValuePages, *, scale: float, softcap: float | None = None) -> Tensor:
        self.pulse.beat()
        return self.plan.run(q, pages, scale=scale, softcap=softcap)
