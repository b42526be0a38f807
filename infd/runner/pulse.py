"""Count what the device thread gets done, so that a watchdog can tell a long step from a stuck one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.ops import Attention, AttentionBatch, AttentionPlan, KeyValuePages


class Pulse:
    """A count that one thread raises and any thread may read."""

    def __init__(self) -> None:
        self.count = 0

    def beat(self, *_: object) -> None:
        """Count one piece of work; whatever a progress callback is told is ignored."""
        self.count += 1


class Beating(Struct, frozen=True):
    """An attention family that beats once per layer: the one place that every layer of every model passes."""

    attention: Attention
    pulse: Pulse

    def prepare(self, batch: AttentionBatch) -> AttentionPlan:
        return BeatingPlan(self.attention.prepare(batch), self.pulse)


class BeatingPlan(Struct, frozen=True):
    plan: AttentionPlan
    pulse: Pulse

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        self.plan.write(k, v, pages)

    def run(self, q: Tensor, pages: KeyValuePages, *, scale: float) -> Tensor:
        self.pulse.beat()
        return self.plan.run(q, pages, scale=scale)
