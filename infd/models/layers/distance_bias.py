"""Biases of attention scores by head and distance, from a table of buckets of distances (MPNet, T5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.blueprint import Blueprint

MOST_DISTANCE = 128  # tokens, from which on all distances of a direction share a bucket


class DistanceBias:
    """The biases [H, 2 * R + 1] float32 of families.span_attention.SpanPlan.run."""

    def __init__(self, blueprint: Blueprint, name: str, heads: int, buckets: int) -> None:
        """Declare the biases of the buckets: [buckets, heads], stored as `name`."""
        self._stored = blueprint.declare({f"{name}.weight": buckets}, (heads,), dtype=torch.float32)
        self._bucket = bucket(torch.arange(-MOST_DISTANCE, MOST_DISTANCE + 1), buckets).to(blueprint.device)

    @property
    def table(self) -> Tensor:
        """The biases by distance, from the stored biases."""
        return self._stored.tensor[self._bucket].T.contiguous()


def bucket(distance: Tensor, buckets: int) -> Tensor:
    """Return the buckets of distances (key - query) [n] int64: T5's, in both directions, up to MOST_DISTANCE."""
    half = buckets // 2
    exact = half // 2
    size = distance.abs()
    far = exact + (torch.log(size.clamp(min=1).float() / exact) / math.log(MOST_DISTANCE / exact) * (half - exact)).to(
        torch.int64
    )
    return (distance > 0) * half + torch.where(size < exact, size, far.clamp(max=half - 1))
