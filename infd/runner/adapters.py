"""Hold adapters in the device's slots, and say which tokens of a step want which.

On a CPU a slot holds the host's own tensors; a GPU gets a copy, issued in the
order of the steps. A step in which no token wants an adapter does nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infd.errors import RequestFailed
from infd.kernels.ops import LowRank, LowRankPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.ops import Lora
    from infd.models.parameter import Target
    from infd.scheduler.plan import Load

    Array = npt.NDArray[Any]
    Changes = Mapping[Target, LowRank]


class DeviceSlots:
    """What each slot holds. Lives on the device thread."""

    def __init__(self, lora: Lora, device: torch.device) -> None:
        self.lora = lora
        self._device = device
        self._held: dict[int, Changes] = {}

    def __len__(self) -> int:
        return len(self._held)

    def fill(self, loads: Iterable[Load]) -> None:
        """Take adapters in. Raises RequestFailed where one does not fit the device's memory."""
        for load in loads:
            self._held.pop(load.slot, None)  # first, so that two never need room at once
            low: Changes = load.adapter.weights.low
            try:
                self._held[load.slot] = low if self._device.type == "cpu" else self._copied(low)
            except torch.OutOfMemoryError as error:
                raise RequestFailed(
                    f"the device has no memory left for adapter {load.adapter.name!r};"
                    " lower lora.max_adapters or cache.bytes"
                ) from error

    def empty(self, slot: int) -> None:
        """Let go of what a slot holds."""
        self._held.pop(slot, None)

    def adapted(self, slots: Array) -> AdaptedRows | None:
        """Return what the rows of a pass want, given the slot of each; None where all want the model itself."""
        return AdaptedRows(self, slots) if slots.any() else None

    def groups(self, slots: Array) -> list[tuple[Tensor, Changes]]:
        """Return the rows of each adapter, ascending."""
        order = np.argsort(slots, kind="stable")
        found, first = np.unique(slots[order], return_index=True)
        ends = [*first[1:], len(slots)]
        return [
            (self._upload(order[begin:end]), self._held[slot])
            for slot, begin, end in zip(found.tolist(), first, ends, strict=True)
            if slot
        ]

    def _upload(self, rows: Array) -> Tensor:
        return torch.from_numpy(rows).to(self._device, non_blocking=True)

    def _copied(self, low: Changes) -> Changes:
        def copied(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=True)

        return {
            target: LowRank(copied(each.a), [LowRankPart(copied(part.b), *part[1:]) for part in each.parts])
            for target, each in low.items()
        }


class AdaptedRows:
    """Implements `models.base.Adapted` for rows whose slots are known."""

    def __init__(self, held: DeviceSlots, slots: Array) -> None:
        self._held = held
        self._slots = slots
        self._groups = held.groups(slots)

    def at(self, rows: Array) -> AdaptedRows | None:
        """Return what some of these rows want, which make a pass of their own in the order given."""
        return self._held.adapted(self._slots[rows])

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        if groups := self._wanting(target):
            self._held.lora.add(y, x, groups)

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        if groups := self._wanting(target):
            self._held.lora.add_rows(y, tokens, groups)

    def _wanting(self, target: Target) -> list[tuple[Tensor, LowRank]]:
        return [(rows, changes[target]) for rows, changes in self._groups if target in changes]
