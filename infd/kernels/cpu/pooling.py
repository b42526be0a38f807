"""Pooling in C++: `native/pooling.cpp`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from infd.kernels.cpu.library import FLOAT, INT, MEMORY, POINTER, Library
from infd.kernels.families.pooling import LEAST_LENGTH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.host import Upload
    from infd.kernels.families.pooling import Array


class Pooling:
    """Implements families.pooling.Pooling."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._sum = library.kernel("sum_spans", INT, POINTER, INT, POINTER, POINTER, INT, POINTER)
        self._normalize = library.kernel("normalize_rows", POINTER, INT, INT, INT, FLOAT, POINTER, POINTER)

    def sums(self, states: Tensor, counts: Sequence[int], divisors: Sequence[float], upload: Upload) -> Tensor:
        states = states.contiguous()
        assert sum(counts) <= states.shape[0]
        spans, width = len(counts), states.shape[1]
        found = torch.empty(spans, width)
        half, numbers, over = states.dtype is torch.bfloat16, (INT * spans)(*counts), (FLOAT * spans)(*divisors)
        self._sum(half, states.data_ptr(), width, numbers, over, spans, found.data_ptr())
        return found

    def prepare(self, states: Tensor, counts: Sequence[int]) -> PreparedMeans:
        """Return the means of spans of counts[i] rows each of `states` [N, width], which may be computed later."""
        return PreparedMeans(self._sum, self._normalize, states, counts)

    def normalized(self, rows: Tensor) -> tuple[Array, Sequence[bool]]:
        assert rows.stride(1) == 1
        count, width = rows.shape
        found, finite = np.empty((count, width), np.float32), (ctypes.c_bool * count)()
        memory = MEMORY.from_buffer(found.data)
        self._normalize(rows.data_ptr(), rows.stride(0), count, width, LEAST_LENGTH, memory, finite)
        return found, finite[:]


class PreparedMeans:
    """The means of spans, normalized.

    The arguments of calls are prepared before the states are computed: afterwards it takes three times as long, as
    weights have evicted Python's code from the CPU's cache.
    """

    def __init__(
        self,
        sum_spans: Callable[..., None],
        normalize_rows: Callable[..., None],
        states: Tensor,
        counts: Sequence[int],
    ) -> None:
        spans, width = len(counts), states.shape[1]
        half, numbers, divisors = states.dtype is torch.bfloat16, (INT * spans)(*counts), (FLOAT * spans)(*counts)
        self._found, self._finite = np.empty((spans, width), np.float32), (ctypes.c_bool * spans)()
        found = MEMORY.from_buffer(self._found.data)
        self._sum, self._normalize = sum_spans, normalize_rows
        self._summed = half, states.data_ptr(), width, numbers, divisors, spans, found
        self._normalized = found, width, spans, width, LEAST_LENGTH, found, self._finite

    def __call__(self) -> tuple[Array, Sequence[bool]]:
        """Return what `normalized` returns."""
        self._sum(*self._summed)
        self._normalize(*self._normalized)
        return self._found, self._finite[:]
