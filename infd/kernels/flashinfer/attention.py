"""Paged attention by FlashInfer.

Steps with prompts use FlashInfer's prefill kernel, which supports any mix of query lengths. Steps that only decode use
XQA, which needs no plan (`device_state.py`); layers that XQA does not support use the planned decode kernel
(`wrappers.py`). `captured.py` implements captured steps. Unsupported head sizes, sinks in any kernel but XQA, writes to
an fp8 cache and other cases are delegated to Triton; `infdctl ops` reports the cases that have occurred.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.families.attention import FLOAT8
from infd.kernels.flashinfer.captured import CapturedPlan
from infd.kernels.flashinfer.delegation import Delegation
from infd.kernels.flashinfer.device_state import BYTES, DeviceState
from infd.kernels.flashinfer.steps import Steps
from infd.kernels.flashinfer.wrappers import Keys, LayerParams, Wrapper, plan
from infd.kernels.triton.attention import Float8PagedAttention as Float8Other
from infd.kernels.triton.attention import PagedAttention as Other

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, AttentionPlan


class PagedAttention:
    """Implements families.attention.Attention."""

    def __init__(
        self, package: Any = None, other: Other | None = None, *, backend: str = "auto", planned: bool = False
    ) -> None:
        """Set up.

        package  the flashinfer module, or a substitute with its functions
        other    computes the delegated cases
        backend  the prefill kernel, "fa2" or "fa3"; "auto": FlashInfer's choice
        planned  decode with a plan even if XQA supports the layer
        """
        self._package = package or import_module("flashinfer")
        self._other = other or Other()
        self._backend, self._planned = backend, planned
        self._delegation = Delegation()
        self._memory: Tensor | None = None
        self._state: DeviceState | None = None

    @property
    def refused(self) -> dict[str, str]:
        return self._delegation.refused

    @property
    def workspace_bytes(self) -> int:
        return BYTES

    def work_in(self, memory: Tensor) -> None:
        self._memory, self._state = memory, None

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        return Plan(batch, self._on(batch.table.device), self._other.prepare(batch))

    def captured(self, batch: AttentionBatch) -> CapturedPlan:
        return CapturedPlan(batch, self._on(batch.table.device), self._other.captured(batch))

    def _on(self, device: torch.device) -> DeviceState:
        if self._state is None:
            self._state = DeviceState(
                self._package, device, self._delegation, self._memory, backend=self._backend, planned=self._planned
            )
        return self._state


class Float8PagedAttention(PagedAttention):
    """Implements families.attention.Attention over an fp8 cache.

    Of the prefill kernels, only fa2 supports an fp8 cache with queries of another dtype.
    """

    def __init__(self, package: Any = None, other: Other | None = None) -> None:
        super().__init__(package, other or Float8Other(), backend="fa2")

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, FLOAT8


class Plan(Steps):
    """The attention of one step over one page group.

    Layers plan wrappers, because head dimensions are known only to layers; layers with equal parameters share a plan.
    """

    def __init__(self, batch: AttentionBatch, state: DeviceState, other: AttentionPlan) -> None:
        super().__init__(batch, state, other)
        self._planned: dict[LayerParams, Wrapper] = {}
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

    def _wrapper(self, params: LayerParams) -> Wrapper:
        planned = self._planned.get(params)
        if planned is None:
            planned = self._planned[params] = self._plan(params)
        return planned

    def _plan(self, params: LayerParams) -> Wrapper:
        batch = self._batch
        free = self._state.decoding[params.tensor_cores] if self._decodes else self._state.prompts
        keys = Keys.of(batch.starts, batch.counts, batch.page_tokens, batch.window)
        wrapper = free.take()
        if self._decodes:
            plan(wrapper, params, keys, keys.pages(batch), batch)
        else:
            queries = torch.tensor(batch.offsets, dtype=torch.int32)
            plan(wrapper, params, keys, keys.pages(batch), batch, queries, causal=True)
        free.mark_used(wrapper, self, batch.table.device)
        return wrapper
