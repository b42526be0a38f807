"""The loads of a mixture's experts: how many of the sampled tokens chose each expert.

A load that is far from even costs ranks that share the experts: all wait for the one with the busiest.
"""

from __future__ import annotations

from array import array
from operator import add
from typing import Final

from msgspec import Struct

# Once a layer's tokens are more than this, all counts are halved, so that loads follow a change of the requests.
RECENT_CHOICES: Final = 2**20


class LayerLoad(Struct, frozen=True):
    """The loads of one layer's experts.

    layer    index among the layers with experts
    choices  number of choices counted
    counts   choices of each expert
    """

    layer: int
    choices: int
    counts: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """The load of the busiest expert, relative to the mean; 1: all are equal."""
        return max(self.counts) * len(self.counts) / self.choices if self.choices else 1.0

    @property
    def unused(self) -> int:
        """Number of experts that no token chose."""
        return self.counts.count(0)


class ExpertLoads:
    """Counts of the latest sampled steps. Another thread may read while `add` counts.

    steps  sampled steps
    """

    def __init__(self, experts: int = 0) -> None:
        """experts: number of experts of a layer; 0: the model has none."""
        self.steps = 0
        self._experts = experts
        self._counts = array("q")  # [layers x experts]; replaced, never changed

    def add(self, loads: bytes) -> None:
        """Count a step. loads: see StepResult.expert_loads."""
        new = array("i", loads)
        total = array("q", map(add, self._counts, new) if self._counts else new)
        if sum(total[: self._experts]) > RECENT_CHOICES:
            total = array("q", (count // 2 for count in total))
        self._counts = total
        self.steps += 1

    def layers(self) -> list[LayerLoad]:
        """Return the loads of each layer; empty before the first sampled step."""
        counts, size = self._counts, self._experts
        found = []
        for layer in range(len(counts) // size if size else 0):
            each = tuple(counts[layer * size : (layer + 1) * size])
            found.append(LayerLoad(layer, sum(each), each))
        return found
