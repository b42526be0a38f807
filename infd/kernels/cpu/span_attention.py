"""Attention without a cache in C++: `native/attention.cpp`, over the step's own keys and values.

A result depends neither on other spans of the step, nor on which tokens are queries, nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.attention import Layer, Step
from infd.kernels.cpu.library import INT, Library
from infd.kernels.families.span_attention import WHOLE, Reach, packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.span_attention import SpanBatch


class SpanAttention:
    """Implements families.span_attention.SpanAttention."""

    def __init__(self, library: Library | None = None) -> None:
        self._attend = (library or Library()).kernel("attention", ctypes.POINTER(Step), ctypes.POINTER(Layer))

    def prepare(self, batch: SpanBatch) -> Plan:
        return Plan(batch, self._attend)


class Plan:
    """Implements families.span_attention.SpanPlan. `encoder.py` reads steps."""

    def __init__(self, batch: SpanBatch, attend: Callable[..., None]) -> None:
        offsets = batch.offsets or (0,)
        self._offsets = (INT * len(offsets))(*offsets)  # keeps alive the memory to which steps point
        self._tokens, self._attend = batch.tokens, attend
        self._queries = None
        if batch.queries is not None:
            self._tokens = len(batch.queries)
            self._queries = (INT * self._tokens)(*batch.queries)
        self._steps: dict[Reach, Step] = {}

    @property
    def query_address(self) -> int | None:
        """Return the address of SpanBatch.queries, [Q] int64."""
        return None if self._queries is None else ctypes.addressof(self._queries)

    def step(self, reach: Reach) -> Step:
        """Return the step in which each query sees the keys within `reach`."""
        if reach not in self._steps:
            self._steps[reach] = Step(
                tokens=self._tokens,
                spans=len(self._offsets) - 1,
                offsets=ctypes.addressof(self._offsets),
                packed=True,
                before=-1 if reach.before is None else reach.before,
                after=-1 if reach.after is None else reach.after,
                queries=self.query_address,
            )
        return self._steps[reach]

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, reach: Reach = WHOLE, bias: Tensor | None = None
    ) -> Tensor:
        q, k, v = (packed(x) for x in (q, k, v))
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        layer = Layer(
            half=q.dtype is torch.bfloat16,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            size=q.shape[2],
            q=q.data_ptr(),
            q_stride=q.stride(0),
            k=k.data_ptr(),
            v=v.data_ptr(),
            out=out.data_ptr(),
            scale=scale,
            kv_stride=k.stride(0),
            bias=None if bias is None else bias.data_ptr(),
            furthest=0 if bias is None else bias.shape[1] // 2,
            awake=True,
        )
        self._attend(self.step(reach), layer)
        return out
