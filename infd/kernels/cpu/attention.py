"""Paged attention in C++: `native/attention.cpp`.

The cache stores floats, or int8 with one scale for each head of each token: `native/row.h`.

A result depends neither on other spans of the step nor on the number of threads. In spans of up to 16 tokens it is the
result of a span of one token, to the bit. In longer spans its rounding depends on the number of queries, that is, on
how a prompt is divided into chunks.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from infd.kernels.cpu.library import FLOAT, INT, POINTER, Library
from infd.kernels.reference.int8 import row_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, KeyValuePages


class Step(ctypes.Structure):
    """The C structure AttentionStep of `native/attention.h`."""

    _fields_ = (
        ("tokens", INT),
        ("spans", INT),
        ("page_tokens", INT),
        ("window", INT),
        ("table_width", INT),
        ("offsets", POINTER),
        ("start", POINTER),
        ("table", POINTER),
        ("packed", INT),
        ("before", INT),
        ("after", INT),
        ("queries", POINTER),
    )


class Layer(ctypes.Structure):
    """The C structure AttentionLayer of `native/attention.h`."""

    _fields_ = (
        ("half", INT),
        ("quantized", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("size", INT),
        ("q", POINTER),
        ("q_stride", INT),
        ("k", POINTER),
        ("v", POINTER),
        ("out", POINTER),
        ("scale", FLOAT),
        ("softcap", FLOAT),
        ("awake", INT),
        ("kv_stride", INT),
        ("bias", POINTER),
        ("furthest", INT),
        ("sinks", POINTER),
    )


class PagedAttention:
    """Implements families.attention.Attention."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._attend = library.kernel("attention", ctypes.POINTER(Step), ctypes.POINTER(Layer))
        self._write = library.kernel("write_pages", INT, INT, POINTER, POINTER, POINTER, INT, INT, INT, INT, INT)

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        return Plan(batch, self._attend, self._write)

    def captured(self, _: AttentionBatch) -> None:
        """Return None: steps on a CPU are never captured."""


class Int8PagedAttention(PagedAttention):
    """Implements families.attention.Attention over an int8 cache."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return row_bytes(size), torch.int8


class Plan:
    """The attention of one step over one page group.

    Kernels read the exact lengths in `batch.start`, not the host's upper bounds. `stack.py` reads `step` and `slots`.
    """

    def __init__(self, batch: AttentionBatch, attend: Callable[..., None], write: Callable[..., None]) -> None:
        offsets = np.array(batch.offsets, dtype=np.int64)
        self._batch, self._offsets = batch, offsets  # keeps alive the memory to which `step` points
        self.slots, self._page_tokens = batch.slots, batch.page_tokens
        self.step = Step(
            tokens=len(batch.slots),
            spans=len(batch.counts),
            page_tokens=batch.page_tokens,
            window=batch.window or 0,
            table_width=batch.table.stride(0),
            offsets=offsets.ctypes.data,
            start=batch.start.data_ptr(),
            table=batch.table.data_ptr(),
        )
        self._attend, self._put = attend, write

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        for new, cache in ((k, pages.k), (v, pages.v)):
            rows = _packed_heads(new)
            tokens, heads, size = rows.shape
            self._put(
                rows.dtype is torch.bfloat16,
                cache.dtype is torch.int8,
                cache.data_ptr(),
                rows.data_ptr(),
                self.slots.data_ptr(),
                tokens,
                heads,
                self._page_tokens,
                size,
                rows.stride(0),
            )

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q = _packed_heads(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        layer = Layer(
            half=q.dtype is torch.bfloat16,
            quantized=pages.k.dtype is torch.int8,
            heads=q.shape[1],
            kv_heads=pages.k.shape[1],
            size=q.shape[2],
            q=q.data_ptr(),
            q_stride=q.stride(0),
            k=pages.k.data_ptr(),
            v=pages.v.data_ptr(),
            out=out.data_ptr(),
            scale=scale,
            softcap=softcap or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        self._attend(self.step, layer)
        return out


def _packed_heads(x: Tensor) -> Tensor:
    """Return x [T, heads, D] with each token's elements contiguous, copied only if necessary.

    The stride between tokens is arbitrary.
    """
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
