"""Decoding steps for CUDA graphs: FlashInfer's kernels over tensors at fixed addresses.

XQA reads lengths computed on the device. The wrappers of the planned decode kernel are planned before each replay,
outside the graph: a plan changes how keys are split, but neither the grid nor the buffers' addresses. Page ids are
gathered on the device, since only the device has the step's page tables.

Work that all layers share runs once per step, in `begin`. The first step is not captured: it records which work the
layers share.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from infd.kernels.flashinfer.steps import Steps
from infd.kernels.flashinfer.wrappers import Keys, LayerParams, Wrapper, plan, recorded
from infd.kernels.triton.gather import gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch
    from infd.kernels.families.attention import CapturedPlan as OtherPlan
    from infd.kernels.flashinfer.device_state import DeviceState

PLANNED = 2**20  # bytes for one plan, which has a few integers for each split of the keys


class CapturedPlan(Steps):
    """Decoding steps of one batch size and one page group."""

    _other: OtherPlan

    def __init__(self, batch: AttentionBatch, state: DeviceState, other: OtherPlan) -> None:
        super().__init__(batch, state, other)
        state.expect(batch.table)
        self._starts = batch.starts
        self._shared: list[Callable[[], object]] = []
        self._planned: dict[LayerParams, Planned] = {}
        self._counted: Tensor | None = None
        self._where: tuple[Tensor, Tensor] | None = None

    def refill(self, starts: list[int]) -> None:
        self._starts = starts
        self._other.refill(starts)
        for planned in self._planned.values():
            planned.plan(starts)

    def begin(self) -> None:
        self._other.begin()
        for work in self._shared:
            work()

    def _places(self) -> tuple[Tensor, Tensor]:
        if self._where is None:
            slots = torch.zeros_like(self._batch.slots, dtype=torch.int32)
            self._where = slots, torch.zeros_like(slots)
            self._share(partial(slots.copy_, self._batch.slots))
        return self._where

    def _lengths(self) -> Tensor:
        if self._counted is None:
            lengths = torch.zeros_like(self._batch.start)
            self._counted = lengths.view(torch.uint32)
            self._share(partial(torch.add, self._batch.start, 1, out=lengths))
        return self._counted

    def _wrapper(self, params: LayerParams) -> Wrapper:
        planned = self._planned.get(params)
        if planned is None:
            planned = self._planned[params] = Planned(self._batch, self._state, params)
            planned.plan(self._starts)
            self._share(planned.gather)
        return planned.wrapper

    def _share(self, work: Callable[[], object]) -> None:
        """Run `work` now, and again at the start of every later step.

        `work` must not reference this plan: the reference cycle would keep a dropped plan's buffers until garbage
        collection.
        """
        work()
        self._shared.append(work)


class Planned:
    """A wrapper for decoding steps of one batch size, and its input buffers.

    first, last  as in `Keys`, copied from the host by each plan
    skipped      [S] int32, as in `Keys`
    pages        [>= S * width] int32: ids of the pages in the queries' windows, span after span
    """

    def __init__(self, batch: AttentionBatch, state: DeviceState, params: LayerParams) -> None:
        size, device = len(batch.table), batch.table.device

        def zeros(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        self._batch, self._params = batch, params
        self._first, self._last, self._skipped = zeros(size + 1), zeros(size), zeros(size)
        self._pages = state.pages(batch.table, params)
        self._copied: torch.cuda.Event | None = None
        said = zeros(PLANNED, torch.uint8)
        self.wrapper = state.captured_decoder(params.tensor_cores, self._first, self._pages, self._last, said)

    def plan(self, starts: list[int]) -> None:
        """Plan the wrapper for spans that start at `starts`."""
        batch = self._batch
        if self._copied is not None:  # planning overwrites pinned memory that the previous plan's copy reads
            self._copied.synchronize()
        keys = Keys.of(starts, batch.counts, batch.page_tokens, batch.window)
        plan(self.wrapper, self._params, keys, self._pages[:0], batch)
        self._skipped.copy_(torch.from_numpy(keys.skipped), non_blocking=True)
        self._copied = recorded(batch.table.device)

    def gather(self) -> None:
        """Gather the page ids of the step; captured with the layers."""
        gather(self._batch.table, self._first, self._skipped, self._pages)
