"""Quantize weights to fp8 E4M3 in plain torch, with a float32 scale for each row: its largest magnitude / 448."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from infd.groups import GroupedRows
from infd.input_scheme import InputScheme
from infd.kernels.reference.dense import Rounded
from infd.kernels.reference.int8 import LEAST

if TYPE_CHECKING:
    from torch import Tensor

LARGEST: Final = 448.0  # of E4M3's numbers
BY_TOKEN: Final = InputScheme("e4m3")


def scales_of(rows: Tensor) -> Tensor:
    """Return the scale of each row of float32 rows [n, in]: [n, 1]; NaN if the row has non-finite numbers."""
    largest = rows.abs().amax(1, keepdim=True)
    scales = torch.where(largest < LEAST, 0, largest / LARGEST)
    return torch.where(rows.isfinite().all(1, keepdim=True), scales, torch.nan)


def numbers_of(rows: Tensor, scales: Tensor) -> Tensor:
    """Return the E4M3 numbers nearest to rows [n, in] / scales [n, 1]."""
    inverses = torch.where(scales > 0, 1 / scales, 0)
    return (rows * inverses).nan_to_num(0, 0, 0).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def quantize(rows: Tensor) -> GroupedRows:
    """Return rows [n, in] as bytes of E4M3, minus 128 as indices of the table e4m3, and scales [n, 1] float32."""
    rows = rows.float()
    scales = scales_of(rows)
    codes = numbers_of(rows, scales).view(torch.uint8)
    return GroupedRows((codes.to(torch.int16) - 128).to(torch.int8), scales)


def decode(rows: GroupedRows) -> Tensor:
    """Return the rows, float32 [n, in]."""
    codes = (rows.integers.to(torch.int16) + 128).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).float() * rows.scales


class Matrices(Rounded):
    """Weights rounded to fp8, and stored in the activations' dtype; products round their inputs by token."""

    numbers = (8, "e4m3")
    rounds = BY_TOKEN

    def round(self, rows: Tensor) -> Tensor:
        return decode(quantize(rows))
