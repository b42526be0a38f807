"""Weights made int4 while they are loaded, in plain torch: what the word means.

Each 32 weights of a row are whole numbers from -8 to 7 times a scale, of bfloat16: that which makes the farthest from
zero -8. Activations stay what they are but for rounding: each 32 of a row become int8 where they are multiplied, which
costs them about as much as bfloat16 does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from msgspec import Struct
from torch.nn import functional as F

from infd.kernels.families.matrices import LEAST_ROWS
from infd.kernels.reference import int8

if TYPE_CHECKING:
    from torch import Tensor

GROUP: Final = 32
SCALE: Final = 2  # bytes before the numbers of a group
LEAST: Final = int8.LEAST


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, in] as whole numbers [n, groups, GROUP] in int8, and the scales [n, groups] in bfloat16.

    A group that is not finite has the scale NaN.
    """
    groups = _grouped(rows.float())
    most, least = groups.amax(2).clamp(min=0), groups.amin(2).clamp(max=0)
    farthest = torch.where(most > -least, most, least)
    scales = torch.where(farthest.abs() < LEAST, 0, farthest / -8)
    scales = torch.where(groups.isfinite().all(2), scales, torch.nan).bfloat16()
    inverses = torch.where(scales != 0, 1 / scales.float(), 0)
    numbers = (groups * inverses[..., None]).nan_to_num(0, 0, 0).round().clamp(-8, 7)
    return numbers.to(torch.int8), scales


class Rows(Struct, frozen=True):
    """A matrix row after row, group after group: the scale, then two numbers a byte, the earlier in the lower half."""

    outputs: int
    inputs: int
    activations: torch.dtype
    dtype: torch.dtype = torch.uint8
    least_rows: int = LEAST_ROWS

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.outputs, -(-self.inputs // GROUP), SCALE + GROUP // 2)

    def rows(self, kept: Tensor, first: int, count: int) -> None:
        """Return None: checkpoints have other numbers."""

    def place(self, kept: Tensor, first: int, rows: Tensor) -> None:
        numbers, scales = quantize(rows)
        halves = numbers.view(torch.uint8).bitwise_and(15)
        packed = halves[..., 0::2] | halves[..., 1::2] << 4
        kept[first : first + len(rows)] = torch.cat((scales[..., None].view(torch.uint8), packed), 2)

    def multiply(self, x: Tensor, kept: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        groups = _grouped(x)
        numbers, scales = int8.quantize(groups.flatten(0, 1))
        product = F.linear((numbers * scales).view(len(x), -1), self._weights(kept))
        if bias is not None:
            product += bias
        return product if wide else product.to(x.dtype)

    def look_up(self, tokens: Tensor, kept: Tensor) -> Tensor:
        return self._weights(kept[tokens])[:, : self.inputs].to(self.activations)

    def _weights(self, rows: Tensor) -> Tensor:
        """Return rows in float32, in whole groups."""
        scales, packed = rows[..., :SCALE].contiguous().view(torch.bfloat16), rows[..., SCALE:]
        halves = torch.stack((packed << 4, packed & 240), 3).view(torch.int8) >> 4  # the sign comes with the upper half
        return (halves.flatten(2) * scales.float()).flatten(1)


class Matrices:
    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Rows:
        return Rows(outputs, inputs, dtype)


def _grouped(rows: Tensor) -> Tensor:
    """Return rows [n, in] as [n, groups, GROUP], with zeros behind their ends."""
    return F.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
