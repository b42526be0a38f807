"""Weights of bfloat16 in panels: `native/panels.h` says how they lie, `native/products.h` how they are multiplied.

A row of a product depends on nothing but that row: not on how many there are,
and not on how many threads compute them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library
from infd.kernels.cpu.product import Product, product

if TYPE_CHECKING:
    from torch import Tensor

PANEL = 64  # outputs


class Matrices:
    """The forms of bfloat16 weights."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self.pack = library.kernel("pack_rows", POINTER, INT, POINTER, INT, INT)
        self.unpack = library.kernel("unpack_rows", POINTER, POINTER, INT, INT, POINTER, INT)
        self.linear = library.kernel("linear", POINTER, INT, INT, POINTER, INT, INT, POINTER, POINTER, INT, INT)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Packed:
        assert dtype is torch.bfloat16
        return Packed(self, outputs, inputs)


class Packed:
    """A matrix in panels of outputs, pairs of inputs side by side."""

    dtype = torch.bfloat16

    def __init__(self, kernels: Matrices, outputs: int, inputs: int) -> None:
        self._kernels = kernels
        self._outputs, self._inputs = outputs, inputs
        self.shape = (-(-outputs // PANEL), -(-inputs // 2), PANEL, 2)

    def rows(self, kept: Tensor, first: int, count: int) -> None:
        """Return None: no row lies as checkpoints have it."""

    def place(self, kept: Tensor, first: int, rows: Tensor) -> None:
        rows = rows.to(torch.bfloat16).contiguous()
        assert rows.shape[1] == self._inputs
        assert first + rows.shape[0] <= self._outputs
        self._kernels.pack(kept.data_ptr(), self._inputs, rows.data_ptr(), first, rows.shape[0])

    def multiply(self, x: Tensor, kept: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        rows, inputs = x.shape
        assert (inputs, x.dtype) == (self._inputs, torch.bfloat16)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(rows, self._outputs, dtype=torch.float32 if wide else torch.bfloat16)
        self._kernels.linear(
            x.data_ptr(),
            x.stride(0),
            rows,
            kept.data_ptr(),
            self._outputs,
            inputs,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self._outputs,
            wide,
        )
        return out

    def product(self, kept: Tensor, bias: Tensor | None) -> Product:
        return product(self._kernels.linear, kept, bias, self._outputs, self._inputs)

    def look_up(self, tokens: Tensor, kept: Tensor) -> Tensor:
        tokens = tokens.contiguous()
        out = kept.new_empty(tokens.shape[0], self._inputs)
        self._kernels.unpack(
            out.data_ptr(), kept.data_ptr(), self._outputs, self._inputs, tokens.data_ptr(), tokens.shape[0]
        )
        return out
