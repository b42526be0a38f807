"""Hold adapters in the device's slots, and say which tokens of a step want which.

On a CPU a slot holds the host's own tensors; a GPU gets a copy, issued in the
order of the steps. A step in which no token wants an adapter does nothing here.

Steps that are captured find their adapters by slot, in tables that are brought up to date where a slot has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from infd.errors import RequestFailed
from infd.kernels.families.adapters import ALIGNED, LowRank, LowRankPart
from infd.runner.staging import staging as usual

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.adapters import CapturedLora, Lora, SlotWeights
    from infd.kernels.families.host import Upload
    from infd.models.parameter import Target
    from infd.request import Adapter
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Load

    Array = npt.NDArray[Any]
    Changes = Mapping[Target, LowRank]


class DeviceSlots:
    """The adapters in the host's memory, and what each slot holds. Lives on the device thread.

    weights  what the slots add to each target, for steps that are captured
    """

    def __init__(self, lora: Lora | None, device: torch.device, slots: int = 1, staging: Staging | None = None) -> None:
        """Hold nothing yet.

        lora     None where the model takes no adapters
        slots    how many there are
        staging  carries to `device`; without one, what is usual there
        """
        self.lora = lora
        self.staging = staging or usual(device)
        self.weights: dict[Target, SlotWeights] = {}
        self._device = device
        self._slots = range(1, slots + 1)
        self._read: dict[Adapter, Changes] = {}
        self._held: dict[int, Changes] = {}
        self._changed = False
        self._generation = 0
        self._captured = None if lora is None else lora.captured(1, device)

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, adapter: Adapter, low: Mapping[Any, LowRank]) -> None:
        """Keep an adapter that was read, for loads to name. low: its factors, by `models.parameter.Target`."""
        self._read[adapter] = low

    def forget(self, adapter: Adapter, slot: int | None) -> None:
        """Free an adapter that no later step names, and the slot that holds it."""
        self._read.pop(adapter, None)
        if slot is not None:
            self._held.pop(slot, None)

    def fill(self, loads: Iterable[Load]) -> None:
        """Take adapters in. Raises RequestFailed where one does not fit the device's memory."""
        for load in loads:
            self._changed = True
            self._held.pop(load.slot, None)  # first, so that two never need room at once
            low = self._read[load.adapter]
            try:
                self._held[load.slot] = low if self._device.type == "cpu" else _copied(low, self.staging.up)
            except torch.OutOfMemoryError as error:
                raise RequestFailed(
                    f"the device has no memory left for adapter {load.adapter.name!r};"
                    " lower lora.max_adapters or cache.bytes"
                ) from error

    def adapted(self, slots: Array) -> AdaptedRows | None:
        """Return what the rows of a pass want, given the slot of each; None where all want the model itself."""
        if not slots.any():
            return None
        assert self.lora is not None, "a model without targets takes no adapters"
        return AdaptedRows(self, self.lora, slots)

    def captured(self, size: int) -> CapturedRows | None:
        """Return what the rows of captured steps want; None where such steps have no adapters."""
        lora = None if self.lora is None else self.lora.captured(size, self._device)
        return None if lora is None else CapturedRows(self, lora)

    def weigh(self) -> int:
        """Bring `weights` up to date; return their generation, another one where what was captured no longer holds."""
        if self._changed and self._captured is not None:
            targets = {target: None for changes in self._held.values() for target in changes}
            fresh = {}
            for target in self.weights | targets:
                held = [self._held.get(slot, {}).get(target) for slot in self._slots]
                known = self.weights.get(target)
                if known is None or not known.hold(held, self.staging.fill):
                    outputs = list(target.modules.values())
                    fresh[target] = self._captured.weigh(held, outputs, table=target.table, upload=self.staging.up)
            if fresh:
                self.weights |= fresh
                self._generation += 1
        self._changed = False
        return self._generation

    def groups(self, slots: Array) -> list[tuple[Tensor, Changes]]:
        """Return the rows of each adapter, ascending."""
        order = np.argsort(slots, kind="stable")
        found, first = np.unique(slots[order], return_index=True)
        ends = [*first[1:], len(slots)]
        return [
            (self.staging.up(order[begin:end]), self._held[slot])
            for slot, begin, end in zip(found.tolist(), first, ends, strict=True)
            if slot
        ]


class AdaptedRows:
    """Implements `models.base.PassAdapters` for rows whose slots are known."""

    def __init__(self, held: DeviceSlots, lora: Lora, slots: Array) -> None:
        self._held = held
        self._lora = lora
        self._slots = slots
        self._groups = held.groups(slots)

    def at(self, rows: Array) -> AdaptedRows | None:
        """Return what some of these rows want, which make a pass of their own in the order given."""
        return self._held.adapted(self._slots[rows])

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        if groups := self._wanting(target):
            self._lora.add(y, x, groups, self._held.staging.up)

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        if groups := self._wanting(target):
            self._lora.add_rows(y, tokens, groups, self._held.staging.up)

    def _wanting(self, target: Target) -> list[tuple[Tensor, LowRank]]:
        return [(rows, changes[target]) for rows, changes in self._groups if target in changes]


class CapturedRows:
    """Implements `models.base.PassAdapters` for captured steps of one size."""

    def __init__(self, held: DeviceSlots, lora: CapturedLora) -> None:
        self._held = held
        self._lora = lora

    def refill(self, slots: Sequence[int]) -> None:
        """Be told which slot each row of the next step wants, 0 for none."""
        self._lora.refill(slots, self._held.staging.fill)

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        if (weights := self._held.weights.get(target)) is not None:
            self._lora.add(y, x, weights)

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        if (weights := self._held.weights.get(target)) is not None:
            self._lora.add_rows(y, tokens, weights)


def _copied(low: Changes, upload: Upload) -> Changes:
    """Copy an adapter to the device. What it is read from is not pinned: copied straight from there, it would wait."""

    def copied(matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        padded = functional.pad(matrix, (0, -columns % ALIGNED)).contiguous()
        numbers = padded.view(-1).view(torch.uint8).numpy()
        return upload(numbers).view(matrix.dtype).view(rows, -1)[:, :columns]

    return {
        target: LowRank(copied(each.a), [LowRankPart(copied(part.b), *part[1:]) for part in each.parts])
        for target, each in low.items()
    }
