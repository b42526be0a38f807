"""Weights made int8 while they are loaded: `native/quantized.h` says how they lie, `native/linear_int8.cpp` how they
are multiplied.

Each output has a scale of its own, each row of a product one too, found while it is computed. A row of a product
depends on nothing but that row, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library
from infd.kernels.cpu.linear import PANEL
from infd.kernels.cpu.product import Product, product

if TYPE_CHECKING:
    from torch import Tensor

HEADER_STEPS = 2  # of a panel: the scales, and what sums begin with
MOST_INPUTS = 2**31 // 127**2  # products of so many fit into a sum


class Matrices:
    """The forms of int8 weights."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self.pack = library.kernel("pack_rows_int8", INT, POINTER, INT, POINTER, INT, INT)
        self.unpack = library.kernel("unpack_rows_int8", INT, POINTER, POINTER, INT, INT, POINTER, INT)
        self.linear = library.kernel(
            "linear_int8", INT, POINTER, INT, INT, POINTER, INT, INT, POINTER, POINTER, INT, INT
        )

        self.linear_half = library.kernel("linear_int8_half")

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Packed:
        assert dtype in (torch.bfloat16, torch.float32)
        assert inputs <= MOST_INPUTS
        return Packed(self, outputs, inputs, dtype)


class Packed:
    """A matrix in panels of outputs, each with its scales, four inputs side by side in a word."""

    dtype = torch.int32

    def __init__(self, kernels: Matrices, outputs: int, inputs: int, activations: torch.dtype) -> None:
        self._kernels = kernels
        self._outputs, self._inputs, self._activations = outputs, inputs, activations
        self.shape = (-(-outputs // PANEL), HEADER_STEPS + -(-inputs // 4), PANEL)

    def rows(self, kept: Tensor, first: int, count: int) -> None:
        """Return None: no row lies as checkpoints have it."""

    def place(self, kept: Tensor, first: int, rows: Tensor) -> None:
        rows = (rows if rows.dtype in (torch.bfloat16, torch.float32) else rows.float()).contiguous()
        assert rows.shape[1] == self._inputs
        assert first + rows.shape[0] <= self._outputs
        self._kernels.pack(_half(rows), kept.data_ptr(), self._inputs, rows.data_ptr(), first, rows.shape[0])

    def multiply(self, x: Tensor, kept: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        rows, inputs = x.shape
        assert (inputs, x.dtype) == (self._inputs, self._activations)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(rows, self._outputs, dtype=torch.float32 if wide else x.dtype)
        self._kernels.linear(
            _half(x),
            x.data_ptr(),
            x.stride(0),
            rows,
            kept.data_ptr(),
            self._outputs,
            inputs,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self._outputs,
            out.dtype is torch.float32,
        )
        return out

    def product(self, kept: Tensor, bias: Tensor | None) -> Product:
        assert self._activations is torch.bfloat16  # a stack's numbers are
        return product(self._kernels.linear_half, kept, bias, self._outputs, self._inputs)

    def look_up(self, tokens: Tensor, kept: Tensor) -> Tensor:
        tokens = tokens.contiguous()
        out = torch.empty(tokens.shape[0], self._inputs, dtype=self._activations)
        self._kernels.unpack(
            _half(out),
            out.data_ptr(),
            kept.data_ptr(),
            self._outputs,
            self._inputs,
            tokens.data_ptr(),
            tokens.shape[0],
        )
        return out


def _half(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16
