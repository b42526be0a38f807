"""Decoding steps of one size, which are captured: FlashInfer reads from tensors that stay where they are.

The kernel that needs no plan is given lengths that are worked out on the device. A wrapper is planned before each step,
outside of what is captured: how it cuts keys into parts changes, but not how many parts are launched, nor where that is
looked up. Its pages are gathered on the device, since a step's tables are known there alone.

What all layers share is done once, when a step begins. The first step, which is not captured, finds out what that is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from infd.kernels.flashinfer.steps import Steps
from infd.kernels.flashinfer.wrappers import Asked, Keys, Wrapper, plan, recorded
from infd.kernels.triton.gather import gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch
    from infd.kernels.families.attention import LastingPlan as OtherPlan
    from infd.kernels.flashinfer.space import Space

PLANNED = 2**20  # bytes for what the plan of one size says: some numbers for each part


class LastingPlan(Steps):
    """Decoding steps of one size, of one page group."""

    _other: OtherPlan

    def __init__(self, batch: AttentionBatch, space: Space, other: OtherPlan) -> None:
        super().__init__(batch, space, other)
        space.expect(batch.table)
        self._starts = batch.starts
        self._shared: list[Callable[[], object]] = []
        self._planned: dict[Asked, Planned] = {}
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

    def _wrapper(self, asked: Asked) -> Wrapper:
        planned = self._planned.get(asked)
        if planned is None:
            planned = self._planned[asked] = Planned(self._batch, self._space, asked)
            planned.plan(self._starts)
            self._share(planned.gather)
        return planned.wrapper

    def _share(self, work: Callable[[], object]) -> None:
        """Do what every layer of this step needs, and again whenever a step begins.

        It holds no plan: one that nobody uses any more would wait for a collection, and its buffers with it.
        """
        work()
        self._shared.append(work)


class Planned:
    """A wrapper for decoding steps of one size, and what it reads.

    first, last  as `Keys`, sent from the host with each plan
    skipped      [S] int32: the same
    pages        [S * width] int32 at least: the ids of the pages that queries see, span after span
    """

    def __init__(self, batch: AttentionBatch, space: Space, asked: Asked) -> None:
        size, device = len(batch.table), batch.table.device

        def zeros(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        self._batch, self._asked = batch, asked
        self._first, self._last, self._skipped = zeros(size + 1), zeros(size), zeros(size)
        self._pages = space.pages(batch.table, asked)
        self._copied: torch.cuda.Event | None = None
        said = zeros(PLANNED, torch.uint8)
        self.wrapper = space.lasting_decoder(asked.tensor_cores, self._first, self._pages, self._last, said)

    def plan(self, starts: list[int]) -> None:
        batch = self._batch
        if self._copied is not None:  # with two steps in flight, the one before is next: this has been made by now
            self._copied.synchronize()
        keys = Keys.of(starts, batch.counts, batch.page_tokens, batch.window)
        plan(self.wrapper, self._asked, keys, self._pages[:0], batch)
        self._skipped.copy_(torch.from_numpy(keys.skipped), non_blocking=True)
        self._copied = recorded(batch.table.device)

    def gather(self) -> None:
        gather(self._batch.table, self._first, self._skipped, self._pages)
