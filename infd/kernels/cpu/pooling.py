"""Sums of hidden states in C++: `native/pooling.cpp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.host import Upload


class Pooling:
    """Implements families.pooling.Pooling."""

    def __init__(self, library: Library | None = None) -> None:
        self._sum = (library or Library()).kernel("sum_spans", INT, POINTER, INT, POINTER, INT, POINTER)

    def sums(self, states: Tensor, counts: Sequence[int], upload: Upload) -> Tensor:
        states = states.contiguous()
        assert sum(counts) <= states.shape[0]
        spans, width = len(counts), states.shape[1]
        found = torch.empty(spans, width)
        numbers = (INT * spans)(*counts)
        self._sum(states.dtype is torch.bfloat16, states.data_ptr(), width, numbers, spans, found.data_ptr())
        return found
