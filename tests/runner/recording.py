"""Captures steps on a CPU as strictly as CUDA does on a GPU; attention and adapters with reusable plans.

A recording is the list of torch's operations and their tensors. A replay repeats each operation and writes its result
to the recorded tensor: decisions of the host between operations are not repeated, nor are its copies to the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infd.kernels.reference.lora import Lora

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.adapters import LowRank
    from infd.kernels.families.attention import AttentionBatch, KeyValuePages


class Recordings:
    """Implements `runner.cuda_graphs.capture.Graphs`. made: how many there are"""

    def __init__(self) -> None:
        self.made = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        recording = _Recording()
        with recording:
            work()
        self.made += 1
        return recording.replay


class Impossible:
    """Fails to capture steps of more than `most` sequences, as with too little memory.

    error  raised after the work
    """

    def __init__(self, most: int = 0, error: Exception | None = None) -> None:
        self.most = most
        self.tried: list[int] = []
        self._error = error or torch.OutOfMemoryError("no memory for graphs")
        self._recordings = Recordings()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        size = work.__self__.size  # type: ignore[attr-defined]
        self.tried.append(size)
        if size <= self.most:
            return self._recordings.capture(work)
        work()
        raise self._error


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "this would wait for the device"
        result = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, first in self._steps:
            known = {_memory(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(first), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and _memory(old) not in known:
                    old.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TableAttention:
    """Attends to every key of every page in the table, with a mask, independent of lengths known to the host."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> TablePlan:
        return TablePlan(batch)

    def captured(self, batch: AttentionBatch) -> TablePlan:
        return TablePlan(batch)


class TablePlan:
    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        padding = len(batch.slots) - batch.offsets[-1]  # counts to the first span, before its start
        self._span = batch.up(np.repeat([*range(len(batch.counts)), 0], [*batch.counts, padding]))
        within = np.arange(len(batch.slots)) - np.repeat(batch.offsets, [*batch.counts, padding])
        self._within = batch.up(within)
        self.slots = batch.slots
        self.bounds: list[int] = []

    def refill(self, starts: list[int]) -> None:
        self.bounds = starts

    def begin(self) -> None:
        """Do nothing: layers share nothing."""

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        page, offset = self._batch.slots // self._batch.page_tokens, self._batch.slots % self._batch.page_tokens
        pages.k[page, :, offset] = k
        pages.v[page, :, offset] = v

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None
        batch = self._batch
        table = batch.table.index_select(0, self._span).long()
        k, v = (cache[table].transpose(2, 3).flatten(1, 2) for cache in pages[:2])  # [T, L, K, D]
        at = torch.arange(k.shape[1], device=q.device)
        position = batch.start.index_select(0, self._span) + self._within
        seen = at <= position[:, None]
        if batch.window is not None:
            seen &= at > position[:, None] - batch.window
        k, v = (x.masked_fill(~seen[..., None, None], 0) for x in (k, v))
        queries = q.unflatten(1, (k.shape[2], -1))  # [T, K, G, D]
        scores = torch.einsum("tkgd,tlkd->tkgl", queries, k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("tkgl,tlkd->tkgd", weights, v).flatten(1, 2)


class SlotTables(Lora):
    """Adapters by row, whose captured steps multiply each row with a whole matrix of its own."""

    def captured(self, size: int, device: torch.device) -> SlotTable:  # type: ignore[override]
        return SlotTable(size)


class SlotTable:
    def __init__(self, size: int) -> None:
        self._slots = torch.zeros(size, dtype=torch.int64)

    def slot_weights(
        self, by_slot: Sequence[LowRank | None], outputs: Sequence[int], *, table: bool, upload: Any
    ) -> Whole:
        assert not table
        return Whole(by_slot, sum(outputs))

    def refill(self, slots: Sequence[int], fill: Any) -> None:
        fill(self._slots, np.array(slots))

    def add(self, y: Tensor, x: Tensor, weights: Whole) -> None:
        mine = weights.matrices[self._slots]
        y[:, : mine.shape[1]] += torch.einsum("toi,ti->to", mine, x)

    def add_rows(self, y: Tensor, tokens: Tensor, weights: Whole) -> None:
        raise AssertionError("no adapter here changes the embedding")


class Whole:
    """matrices [slots + 1, out, in]: nothing for slot 0. It outgrows its memory where an adapter has a larger rank."""

    def __init__(self, by_slot: Sequence[LowRank | None], outputs: int) -> None:
        self._ranks = max(low.a.shape[0] for low in by_slot if low is not None)
        inputs = next(low.a.shape[1] for low in by_slot if low is not None)
        self.matrices = torch.zeros(len(by_slot) + 1, outputs, inputs)
        self.replace(by_slot)

    def replace(self, by_slot: Sequence[LowRank | None], fill: Any = None) -> bool:
        if any(low is not None and low.a.shape[0] > self._ranks for low in by_slot):
            return False
        self.matrices.zero_()
        for slot, low in enumerate(by_slot, 1):
            for b, rank, output in () if low is None else low.parts:
                self.matrices[slot, output : output + b.shape[0]] = b @ low.a[rank : rank + b.shape[1]]
        return True
