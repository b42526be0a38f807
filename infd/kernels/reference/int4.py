"""int4 weights in plain torch: the oracle of the int4 forms.

A group of 32 weights of a row is stored as integers from -8 to 7 and a bfloat16 scale, chosen so that the weight of
largest magnitude becomes -8. Activations are quantized to int8 in groups of 32 before each product. Quantizing
activations loses about as much precision as rounding them to bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from msgspec import Struct
from torch.nn import functional as F

from infd.groups import Groups
from infd.input_scheme import InputScheme
from infd.kernels.families.matrices import LEAST_ROWS
from infd.kernels.reference import int8
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import GroupedRows

GROUP: Final = 32
SCALE: Final = 2  # bytes of a group's scale, stored before its values
LEAST: Final = int8.LEAST


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, in] quantized to [n, groups, GROUP] int8, and scales [n, groups] bfloat16.

    The scale of a group with non-finite weights is NaN.
    """
    groups = grouped(rows.float())
    scales = scales_of(groups)
    return numbers_of(groups, scales), scales


def scales_of(groups: Tensor) -> Tensor:
    """Return the scales of float32 groups [n, groups, GROUP]; see `quantize`."""
    most, least = groups.amax(2).clamp(min=0), groups.amin(2).clamp(max=0)
    farthest = torch.where(most > -least, most, least)
    scales = torch.where(farthest.abs() < LEAST, 0, farthest / -8)
    return torch.where(groups.isfinite().all(2), scales, torch.nan).bfloat16()


def numbers_of(groups: Tensor, scales: Tensor) -> Tensor:
    """Return groups / scales [n, groups] bfloat16 as the nearest integers from -8 to 7, int8 [n, groups, GROUP]."""
    inverses = torch.where(scales != 0, 1 / scales.float(), 0)
    return (groups * inverses[..., None]).nan_to_num(0, 0, 0).round().clamp(-8, 7).to(torch.int8)


class QuantizedMatrix(Struct, frozen=True):
    """A matrix by rows and groups. A group: the scale, then two values per byte, the earlier in the lower four bits."""

    outputs: int
    inputs: int
    activations: torch.dtype
    dtype: torch.dtype = torch.uint8
    least_rows: int = LEAST_ROWS
    wide: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.outputs, ceil_div(self.inputs, GROUP), SCALE + GROUP // 2)

    def rows(self, storage: Tensor, first: int, count: int) -> None:
        """Return None: quantized rows differ from the checkpoint's."""

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        self._store(storage, first, *quantize(rows))

    def _store(self, storage: Tensor, first: int, numbers: Tensor, scales: Tensor) -> None:
        """Store numbers [n, groups, GROUP] int8 and scales [n, groups] bfloat16."""
        halves = numbers.view(torch.uint8).bitwise_and(15)
        packed = halves[..., 0::2] | halves[..., 1::2] << 4
        storage[first : first + len(scales)] = torch.cat((scales[..., None].contiguous().view(torch.uint8), packed), 2)

    @property
    def quantizes(self) -> InputScheme:
        return InputScheme("int8", GROUP)

    @property
    def groups(self) -> Groups:
        return Groups(4, GROUP, "BF16")

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        self._store(storage, first, grouped(rows.integers), rows.scales)

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        groups = grouped(x)
        numbers, scales = int8.quantize(groups.flatten(0, 1))
        product = F.linear((numbers * scales).view(len(x), -1), self._weights(storage))
        if bias is not None:
            product += bias
        return product if wide else product.to(x.dtype)

    def look_up(self, tokens: Tensor, storage: Tensor) -> Tensor:
        return self._weights(storage[tokens])[:, : self.inputs].to(self.activations)

    def _weights(self, rows: Tensor) -> Tensor:
        """Return dequantized rows in float32, padded to whole groups."""
        scales, packed = rows[..., :SCALE].contiguous().view(torch.bfloat16), rows[..., SCALE:]
        halves = torch.stack((packed << 4, packed & 240), 3).view(torch.int8) >> 4  # the shift extends the sign
        return (halves.flatten(2) * scales.float()).flatten(1)


class Matrices:
    """Implements families.matrices.Matrices over int4 weights."""

    numbers = (4, "")

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> QuantizedMatrix:
        return QuantizedMatrix(outputs, inputs, dtype)


def grouped(rows: Tensor) -> Tensor:
    """Return rows [n, in] as [n, groups, GROUP], padded with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
