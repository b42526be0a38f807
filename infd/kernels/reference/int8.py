"""int8 weights and int8 caches in plain torch: the oracle of the int8 forms.

A row of weights is stored as integers from -127 to 127 and a scale, the row's largest magnitude / 127. Quantized
values from a checkpoint may be -128. Activations are quantized by row before each product; integer products and sums
are exact. In a cache each head of each token is quantized like a row of weights, and dequantized when attention reads
the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from msgspec import Struct
from torch.nn import functional as F

from infd.groups import Groups
from infd.input_scheme import INT8_BY_TOKEN, InputScheme
from infd.kernels.families.matrices import LEAST_ROWS
from infd.rounding import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import GroupedRows

LEAST: Final = 1e-30  # rows of smaller magnitude become zeros: from 3e-37 down, a scale's inverse overflows
SCALE: Final = 4  # bytes of a row's float32 scale, stored before its values


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, in] as int8, and scales [n, 1] float32; the scale of a row with non-finite elements is NaN."""
    rows = rows.float()
    scales = scales_of(rows)
    return numbers_of(rows, scales), scales


def scales_of(rows: Tensor) -> Tensor:
    """Return the scale of each row of float32 rows; see `quantize`."""
    largest = rows.abs().amax(1, keepdim=True)
    scales = torch.where(largest < LEAST, 0, largest / 127)
    return torch.where(rows.isfinite().all(1, keepdim=True), scales, torch.nan)


def numbers_of(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows / scales as the nearest integers from -127 to 127, int8 [n, in]."""
    inverses = torch.where(scales > 0, 1 / scales, 0)
    return (rows * inverses).nan_to_num(0, 0, 0).round().clamp(-127, 127).to(torch.int8)


def row_bytes(size: int) -> int:
    """Return the bytes of a cached row of `size` elements: the scale, then values padded to a multiple of 4 bytes."""
    return SCALE + round_up(size, 4)


def pack(rows: Tensor) -> Tensor:
    """Return rows [..., size] in the cache's form, [..., row_bytes(size)] int8."""
    numbers, scales = quantize(rows.flatten(0, -2))
    packed = torch.cat((scales.view(torch.int8), numbers), 1)
    return F.pad(packed, (0, row_bytes(rows.shape[-1]) - packed.shape[1])).unflatten(0, rows.shape[:-1])


def unpack(rows: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return cached rows [..., row_bytes(size)] dequantized to [..., size]."""
    scales = rows[..., :SCALE].contiguous().view(torch.float32)
    return (rows[..., SCALE : SCALE + size] * scales).to(dtype)


class QuantizedMatrix(Struct, frozen=True):
    """A matrix by rows: each row's scale, then its values."""

    outputs: int
    inputs: int
    activations: torch.dtype
    dtype: torch.dtype = torch.int8
    least_rows: int = LEAST_ROWS
    wide: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.outputs, SCALE + self.inputs)

    def rows(self, storage: Tensor, first: int, count: int) -> None:
        """Return None: quantized rows differ from the checkpoint's."""

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        numbers, scales = quantize(rows)
        storage[first : first + len(rows)] = torch.cat((scales.view(torch.int8), numbers), 1)

    @property
    def quantizes(self) -> InputScheme:
        return INT8_BY_TOKEN

    @property
    def groups(self) -> Groups:
        return Groups(8, self.inputs, "F32")

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        whole = torch.cat((rows.scales.contiguous().view(torch.int8), rows.integers), 1)
        storage[first : first + len(whole)] = whole

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        numbers, scales = quantize(x)
        weights, weight_scales = self._split(storage)
        product = torch._int_mm(numbers, weights.T) * scales * weight_scales.T
        if bias is not None:
            product += bias
        return product if wide else product.to(x.dtype)

    def look_up(self, tokens: Tensor, storage: Tensor) -> Tensor:
        numbers, scales = self._split(storage[tokens])
        return (numbers * scales).to(self.activations)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, SCALE:], rows[:, :SCALE].flatten().view(torch.float32)[:, None]


class Matrices:
    """Implements families.matrices.Matrices over int8 weights."""

    numbers = (8, "")

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> QuantizedMatrix:
        return QuantizedMatrix(outputs, inputs, dtype)
