"""Load adapters into the device's slots, and select each token's adapter in a step.

On a CPU a slot refers to the adapter's tensors in host memory. On a GPU a slot stores a copy, issued on the stream of
the steps. A step without adapters has no extra cost. Captured steps read adapters from tables with an entry for each
slot; the tables are updated when a slot changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from infd.errors import RequestFailed
from infd.kernels.families.adapters import ALIGNED, LowRank, LowRankPart, Replacement

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
    Changes = Mapping[Target, LowRank | Replacement]


class DeviceSlots:
    """The adapters in host memory and in the device's slots. Used on the device thread only.

    weights  for captured steps: the factors of all slots, by target
    """

    def __init__(self, lora: Lora | None, staging: Staging, slots: int = 1, *, targets: Iterable[Target] = ()) -> None:
        """Start with empty slots.

        lora     None if the model supports no adapters
        staging  copies to the device of the slots
        slots    number of slots; ids are 1..slots
        targets  of the model
        """
        self.lora = lora
        self.staging = staging
        self.weights: dict[Target, SlotWeights] = {}
        self._device = staging.device
        self._slots = range(1, slots + 1)
        self._host: dict[Adapter, Changes] = {}
        self._loaded: dict[int, Changes] = {}
        self._changed = False
        self._generation = 0
        # Which rows an expert's factors change depends on the tokens' routes, which no table of a captured step holds.
        self._fixed = not any(target.experts for target in targets)
        self._captured = self._capturable(1)

    def __len__(self) -> int:
        return len(self._loaded)

    def hold(self, adapter: Adapter, changes: Mapping[Any, LowRank | Replacement]) -> None:
        """Store an adapter in host memory; later plans may load the adapter into a slot.

        changes  the adapter's low-rank factors, and its own layers after pooling, by `models.parameter.Target`
        """
        self._host[adapter] = changes

    def forget(self, adapter: Adapter, slot: int | None) -> None:
        """Free an adapter's host memory, and its slot if it has one. No later step may use the adapter."""
        self._host.pop(adapter, None)
        if slot is not None:
            self._loaded.pop(slot, None)

    def fill(self, loads: Iterable[Load]) -> None:
        """Load adapters into their slots. Raises RequestFailed if an adapter does not fit the device's memory."""
        for load in loads:
            self._changed = True
            self._loaded.pop(load.slot, None)  # frees memory before the new adapter allocates memory
            low = self._host[load.adapter]
            try:
                self._loaded[load.slot] = low if self._device.type == "cpu" else _copied(low, self.staging.up)
            except torch.OutOfMemoryError as error:
                raise RequestFailed(
                    f"the device has no memory left for adapter {load.adapter.name!r};"
                    " lower lora.max_adapters or cache.bytes"
                ) from error

    def adapted(self, slots: Array) -> AdaptedRows | None:
        """Return the adapters of a pass, given the slot of each row; None if no row has an adapter."""
        if not slots.any():
            return None
        assert self.lora is not None, "a model without targets takes no adapters"
        return AdaptedRows(self, self.lora, slots)

    def captured(self, size: int) -> CapturedRows | None:
        """Return the adapters of captured steps of `size` rows; None if model or kernel does not support them."""
        lora = self._capturable(size)
        return None if lora is None else CapturedRows(self, lora)

    def update_weights(self) -> int:
        """Update `weights` to the loaded adapters.

        Returns a generation number, which increases when graphs captured earlier become invalid.
        """
        if self._changed and self._captured is not None:
            targets = {target: None for changes in self._loaded.values() for target in changes if not target.whole}
            replaced = {}
            for target in self.weights | targets:
                loaded = [_low(self._loaded.get(slot, {}).get(target)) for slot in self._slots]
                known = self.weights.get(target)
                if known is None or not known.replace(loaded, self.staging.fill):
                    outputs = list(target.modules.values())
                    replaced[target] = self._captured.slot_weights(
                        loaded, outputs, table=target.table, upload=self.staging.up
                    )
            if replaced:
                self.weights |= replaced
                self._generation += 1
        self._changed = False
        return self._generation

    def _capturable(self, size: int) -> CapturedLora | None:
        return self.lora.captured(size, self._device) if self.lora is not None and self._fixed else None

    def groups(self, slots: Array) -> list[tuple[Tensor, Changes]]:
        """Return the rows of each adapter and its factors by target, in the order of slots.

        slots  each row's slot; rows of slot 0 are omitted
        """
        order = np.argsort(slots, kind="stable")
        found, first = np.unique(slots[order], return_index=True)
        ends = [*first[1:], len(slots)]
        return [
            (self.staging.up(order[begin:end]), self._loaded[slot])
            for slot, begin, end in zip(found.tolist(), first, ends, strict=True)
            if slot
        ]


class AdaptedRows:
    """Implements `models.base.PassAdapters` for uncaptured steps, whose slots are known on the host."""

    def __init__(self, loaded: DeviceSlots, lora: Lora, slots: Array) -> None:
        """slots: each row's slot; 0: the model without adapter."""
        self._loaded = loaded
        self._lora = lora
        self._slots = slots
        self._groups = loaded.groups(slots)

    def at(self, rows: Array) -> AdaptedRows | None:
        """Return the adapters of a pass that consists of `rows` of this pass, in the given order."""
        return self._loaded.adapted(self._slots[rows])

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        if groups := self.groups(target):
            self._lora.add(y, x, groups, self._loaded.staging.up)

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        if groups := self.groups(target):
            self._lora.add_rows(y, tokens, groups, self._loaded.staging.up)

    def replace(self, y: Tensor, x: Tensor, target: Target) -> None:
        for rows, changes in self._groups:
            if isinstance(own := changes.get(target), Replacement):
                y[rows] = functional.linear(x[rows], own.weight, own.bias)

    def groups(self, target: Target) -> list[tuple[Tensor, LowRank]]:
        found = [(rows, _low(changes.get(target))) for rows, changes in self._groups]
        return [(rows, low) for rows, low in found if low is not None]


class CapturedRows:
    """Implements `models.base.PassAdapters` for captured steps of one size."""

    def __init__(self, loaded: DeviceSlots, lora: CapturedLora) -> None:
        self._loaded = loaded
        self._lora = lora

    def refill(self, slots: Sequence[int]) -> None:
        """Upload the slot of each row of the next step; 0: the model without adapter."""
        self._lora.refill(slots, self._loaded.staging.fill)

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        if (weights := self._loaded.weights.get(target)) is not None:
            self._lora.add(y, x, weights)

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        if (weights := self._loaded.weights.get(target)) is not None:
            self._lora.add_rows(y, tokens, weights)

    def replace(self, y: Tensor, x: Tensor, target: Target) -> None:
        """No-op: captured steps decode, and layers after pooling are not part of them."""

    def groups(self, target: Target) -> list[tuple[Tensor, LowRank]]:
        raise AssertionError("a model whose experts adapters may change has no captured steps with adapters")


def _low(change: LowRank | Replacement | None) -> LowRank | None:
    return change if isinstance(change, LowRank) else None


def _copied(changes: Changes, upload: Upload) -> Changes:
    """Copy an adapter to the device by `upload`: a copy from pageable memory would synchronize with the device."""

    def copied(matrix: Tensor) -> Tensor:
        *rows, columns = matrix.shape
        padded = functional.pad(matrix, (0, -columns % ALIGNED)).contiguous()
        numbers = padded.view(-1).view(torch.uint8).numpy()
        return upload(numbers).view(matrix.dtype).view(*rows, -1)[..., :columns]

    def whole(matrix: Tensor) -> Tensor:
        return upload(matrix.contiguous().numpy())

    return {
        target: LowRank(copied(each.a), [LowRankPart(copied(part.b), *part[1:]) for part in each.parts])
        if isinstance(each, LowRank)
        else Replacement(whole(each.weight), None if each.bias is None else whole(each.bias))
        for target, each in changes.items()
    }
