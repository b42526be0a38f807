"""Adapters of a product of 50 outputs a module, and the rows that use them."""

from __future__ import annotations

import torch

from infd.kernels.families.adapters import LowRank, LowRankPart
from tests.kernels.values import draw

ROWS = [torch.arange(0, 40, 2), torch.tensor([1, 44]), torch.tensor([7])]
RANKS = [[4, 4, 4], [16, 0, 80], [0, 1, 0]]


def adapter(ranks: list[int], inputs: int, *, table: bool = False, dtype: torch.dtype = torch.float32) -> LowRank:
    """Return an adapter with one rank per module; rank 0: the module is unchanged."""
    total = sum(ranks)
    parts, rank = [], 0
    for i, each in enumerate(ranks):
        if each:
            parts.append(LowRankPart(draw(50, each, seed=i, dtype=dtype), rank, 50 * i))
        rank += each
    return LowRank(draw(*((inputs, total) if table else (total, inputs)), seed=total, dtype=dtype), parts)
