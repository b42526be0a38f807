"""Paged attention by FlashInfer, where its kernels take what a layer needs.

Steps with prompts go to its kernel for these, which takes any mix of query lengths. Steps that only decode go to the
one that needs no plan (`space.py`), and else to its kernel for decoding, which is planned (`wrappers.py`), whether the
step is captured (`lasting.py`) or not. What none takes goes to Triton: heads of unusual sizes, a cache with scales,
sinks where there are prompts or a plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.flashinfer.fits import asks, writes
from infd.kernels.flashinfer.lasting import LastingPlan
from infd.kernels.flashinfer.space import Space
from infd.kernels.flashinfer.wrappers import Asked, Keys, Wrapper, plan
from infd.kernels.triton.attention import PagedAttention as Other

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.ops import AttentionBatch, KeyValuePages
    from infd.kernels.triton.attention import Plan as OtherPlan


class PagedAttention:
    """The attention family."""

    def __init__(
        self, package: Any = None, other: Other | None = None, *, backend: str = "auto", planned: bool = False
    ) -> None:
        """Set up.

        package  FlashInfer, or what stands for it
        other    takes what FlashInfer does not
        backend  its kernel for prompts, "fa2" or "fa3"; "auto" leaves that to FlashInfer
        planned  whether decoding is planned even where it need not be
        """
        self._package = package or import_module("flashinfer")
        self._other = other or Other()
        self._backend, self._planned = backend, planned
        self._space: Space | None = None

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        return Plan(batch, self._on(batch.table.device), self._other.prepare(batch))

    def lasting(self, batch: AttentionBatch) -> LastingPlan:
        return LastingPlan(batch, self._on(batch.table.device), self._other.lasting(batch))

    def _on(self, device: torch.device) -> Space:
        if self._space is None:
            self._space = Space(self._package, device, backend=self._backend, planned=self._planned)
        return self._space


class Plan:
    """One step of one page group. Wrappers are planned at the first layer, which knows the heads."""

    def __init__(self, batch: AttentionBatch, space: Space, other: OtherPlan) -> None:
        self._batch = batch
        self._space = space
        self._other = other
        self._decodes = all(count == 1 for count in batch.counts)
        self._planned: dict[Asked, Wrapper] = {}
        self._lengths: Tensor | None = None
        self._where: tuple[Tensor, Tensor] | None = None

    @property
    def slots(self) -> Tensor:
        return self._batch.slots

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        if not writes(k, v, pages):
            self._other.write(k, v, pages)
            return
        if self._where is None:
            slots = self._batch.slots.to(torch.int32)
            self._where = slots, torch.zeros_like(slots)
        self._space.append(k, v, pages, *self._where)

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch, space = self._batch, self._space
        asked = asks(q, pages, scale, softcap)
        unplanned = asked is not None and self._decodes and space.needs_no_plan(asked, batch.page_tokens)
        if asked is None or (sinks is not None and not unplanned):
            return self._other.run(q, pages, scale=scale, softcap=softcap, sinks=sinks)
        q = q.contiguous()
        known = batch.offsets[-1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[known:].zero_()  # padding
        if unplanned:
            if self._lengths is None:
                self._lengths = (batch.start + 1).view(torch.uint32)
            table = batch.table.contiguous()
            space.decode(q[:known], pages, table, self._lengths, asked, batch.window, sinks, out[:known])
            return out
        wrapper = self._planned.get(asked)
        if wrapper is None:
            wrapper = self._planned[asked] = self._plan(asked)
        wrapper.run(q[:known], (pages.k, pages.v), out=out[:known])
        return out

    def _plan(self, asked: Asked) -> Wrapper:
        batch = self._batch
        free = self._space.decoding[asked.tensor_cores] if self._decodes else self._space.prompts
        keys = Keys.of(batch.starts, batch.counts, batch.page_tokens, batch.window)
        wrapper = free.take()
        if self._decodes:
            plan(wrapper, asked, keys, keys.pages(batch), batch)
        else:
            queries = torch.tensor(batch.offsets, dtype=torch.int32)
            plan(wrapper, asked, keys, keys.pages(batch), batch, queries, causal=True)
        free.lend(wrapper, self, batch.table.device)
        return wrapper
