"""Paged attention by FlashInfer, where its kernels take what a layer needs.

Steps with prompts go to its kernel for these, which takes any mix of query lengths. Steps that only decode go to the
one that needs no plan (`space.py`), and else to its kernel for decoding, which is planned (`wrappers.py`), whether the
step is captured (`lasting.py`) or not. What none takes goes to Triton: heads of unusual sizes, sinks where there are
prompts or a plan, and what is written to a cache of 8-bit floats. Operators see which of it was met.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.families.attention import FLOAT8
from infd.kernels.flashinfer.lasting import LastingPlan
from infd.kernels.flashinfer.left import Left
from infd.kernels.flashinfer.space import BYTES, Space
from infd.kernels.flashinfer.steps import Steps
from infd.kernels.flashinfer.wrappers import Asked, Keys, Wrapper, plan
from infd.kernels.triton.attention import Float8PagedAttention as Float8Other
from infd.kernels.triton.attention import PagedAttention as Other

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, AttentionPlan


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
        self._left = Left()
        self._memory: Tensor | None = None
        self._space: Space | None = None

    @property
    def refused(self) -> dict[str, str]:
        return self._left.refused

    @property
    def workspace_bytes(self) -> int:
        return BYTES

    def work_in(self, memory: Tensor) -> None:
        self._memory, self._space = memory, None

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        return Plan(batch, self._on(batch.table.device), self._other.prepare(batch))

    def lasting(self, batch: AttentionBatch) -> LastingPlan:
        return LastingPlan(batch, self._on(batch.table.device), self._other.lasting(batch))

    def _on(self, device: torch.device) -> Space:
        if self._space is None:
            self._space = Space(
                self._package, device, self._left, self._memory, backend=self._backend, planned=self._planned
            )
        return self._space


class Float8PagedAttention(PagedAttention):
    """The same over a cache of 8-bit floats. Of its kernels for prompts, one alone reads these beside other queries."""

    def __init__(self, package: Any = None, other: Other | None = None) -> None:
        super().__init__(package, other or Float8Other(), backend="fa2")

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, FLOAT8


class Plan(Steps):
    """One step of one page group. Wrappers are planned at the first layer, which knows the heads."""

    def __init__(self, batch: AttentionBatch, space: Space, other: AttentionPlan) -> None:
        super().__init__(batch, space, other)
        self._planned: dict[Asked, Wrapper] = {}
        self._counted: Tensor | None = None
        self._where: tuple[Tensor, Tensor] | None = None

    def _places(self) -> tuple[Tensor, Tensor]:
        if self._where is None:
            slots = self._batch.slots.to(torch.int32)
            self._where = slots, torch.zeros_like(slots)
        return self._where

    def _lengths(self) -> Tensor:
        if self._counted is None:
            self._counted = (self._batch.start + 1).view(torch.uint32)
        return self._counted

    def _wrapper(self, asked: Asked) -> Wrapper:
        planned = self._planned.get(asked)
        if planned is None:
            planned = self._planned[asked] = self._plan(asked)
        return planned

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
