"""Matrices of integers in groups, of every kind that checkpoints store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.groups import BLOCK, GroupedRows, Groups
from infd.kernels.families.matrices import SCALE_TYPES
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from torch import Tensor

KINDS = (
    Groups(4, 32, "BF16"),
    Groups(4, 128, "F16", zeros=True),
    Groups(4, 32, "F16", zeros=True, order="some"),
    Groups(4, 10_000, "F32"),
    Groups(4, 32, "F16", minima=True),
    Groups(4, 32, "I8", minima=True),
    Groups(4, 16, "I8"),
    Groups(4, 32, "BF16", table="e2m1"),
    Groups(4, 16, "F32", table="e2m1"),
    Groups(4, 32, "F16", table="iq4_nl"),
    Groups(6, 16, "I8"),
    Groups(6, 32, "F16", minima=True),
    Groups(8, 16, "I8"),
    Groups(8, 32, "F16", minima=True),
    Groups(8, 64, "BF16", zeros=True),
    Groups(8, 10_000, "F32"),
    Groups(8, 10_000, "F32", table="e4m3"),
    Groups(8, 128, "F32", table="e4m3"),
)


def rows_of(kind: Groups, outputs: int, inputs: int, seed: int = 1) -> GroupedRows:
    """Return random rows of a kind."""
    draw = torch.Generator().manual_seed(seed)
    size = min(kind.inputs, inputs)
    counts = outputs, ceil_div(inputs, size)

    def scales() -> Tensor:
        if kind.scales == "I8":
            return torch.randint(-60, 60, counts, generator=draw).to(torch.int8)
        return torch.randn(counts, generator=draw).to(SCALE_TYPES[kind.scales])

    half = 1 << kind.bits - 1
    low = 0 if kind.minima and kind.bits == 4 else -half
    integers = torch.randint(low, low + 2 * half, (outputs, inputs), generator=draw).to(torch.int8)
    if kind.table == "e4m3":
        integers.masked_fill_((integers.to(torch.int16) + 128) % 128 == 127, 0)  # no NaN
    blocks = ceil_div(inputs, BLOCK) * (1 + kind.minima)
    return GroupedRows(
        integers,
        scales(),
        torch.randint(-8, 8, counts, generator=draw).to(torch.int8) if kind.zeros else None,
        torch.randperm(inputs, generator=draw) if kind.order else None,
        scales() if kind.minima else None,
        torch.rand(outputs, blocks, generator=draw).half() if kind.scales == "I8" else None,
    )
