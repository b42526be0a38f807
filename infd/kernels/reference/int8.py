"""What int8 means, in plain torch: of weights, while they are loaded, and of the cache.

A row of weights is whole numbers from -127 to 127 times a scale, a 127th of its largest number. So is a row of
activations, each time it is multiplied. Products and sums of whole numbers are exact. In the cache each head of a token
is such a row; it is multiplied as what it stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from msgspec import Struct
from torch.nn import functional as F

from infd.kernels.families.matrices import LEAST_ROWS

if TYPE_CHECKING:
    from torch import Tensor

LEAST: Final = 1e-30  # a row whose largest number is smaller counts as zeros: its scale would have no inverse
SCALE: Final = 4  # bytes before the numbers of a row: the scale, a float32


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, in] as int8, and their scales [n, 1] in float32: NaN for a row that is not finite."""
    rows = rows.float()
    largest = rows.abs().amax(1, keepdim=True)
    scales = torch.where(largest < LEAST, 0, largest / 127)
    scales = torch.where(rows.isfinite().all(1, keepdim=True), scales, torch.nan)
    inverses = torch.where(scales > 0, 1 / scales, 0)
    return (rows * inverses).nan_to_num(0, 0, 0).round().to(torch.int8), scales


def row_bytes(size: int) -> int:
    """Return how long a row of `size` numbers is in the cache: its scale, then its numbers, in whole words."""
    return SCALE + -(-size // 4) * 4


def pack(rows: Tensor) -> Tensor:
    """Return rows [..., size] as the cache holds them."""
    numbers, scales = quantize(rows.flatten(0, -2))
    packed = torch.cat((scales.view(torch.int8), numbers), 1)
    return F.pad(packed, (0, row_bytes(rows.shape[-1]) - packed.shape[1])).unflatten(0, rows.shape[:-1])


def unpack(rows: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return what rows of the cache stand for, [..., size]."""
    scales = rows[..., :SCALE].contiguous().view(torch.float32)
    return (rows[..., SCALE : SCALE + size] * scales).to(dtype)


class Rows(Struct, frozen=True):
    """A matrix row after row, each its scale and then its numbers."""

    outputs: int
    inputs: int
    activations: torch.dtype
    dtype: torch.dtype = torch.int8
    least_rows: int = LEAST_ROWS

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.outputs, SCALE + self.inputs)

    def rows(self, kept: Tensor, first: int, count: int) -> None:
        """Return None: checkpoints have other numbers."""

    def place(self, kept: Tensor, first: int, rows: Tensor) -> None:
        numbers, scales = quantize(rows)
        kept[first : first + len(rows)] = torch.cat((scales.view(torch.int8), numbers), 1)

    def multiply(self, x: Tensor, kept: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        numbers, scales = quantize(x)
        weights, weight_scales = self._split(kept)
        product = torch._int_mm(numbers, weights.T) * scales * weight_scales.T
        if bias is not None:
            product += bias
        return product if wide else product.to(x.dtype)

    def look_up(self, tokens: Tensor, kept: Tensor) -> Tensor:
        numbers, scales = self._split(kept[tokens])
        return (numbers * scales).to(self.activations)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, SCALE:], rows[:, :SCALE].flatten().view(torch.float32)[:, None]


class Matrices:
    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Rows:
        return Rows(outputs, inputs, dtype)
