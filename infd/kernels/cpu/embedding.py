"""Rows of the embedding, gathered natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.cpu.library import INT, POINTER, Library

if TYPE_CHECKING:
    from torch import Tensor


class Embedding:
    def __init__(self, library: Library | None = None) -> None:
        self._gather = (library or Library()).kernel("gather_rows", POINTER, POINTER, INT, POINTER, INT, INT)

    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        out = weight.new_empty(tokens.shape[0], weight.shape[1])
        width = weight.shape[1] * weight.itemsize
        self._gather(out.data_ptr(), weight.data_ptr(), weight.shape[0], tokens.data_ptr(), tokens.shape[0], width)
        return out
