"""Calibrated scales of an fp8 cache: divisors of a layer's keys and values, one for all heads or one for each head.

Caches of other dtypes do not use the scales. Scales of queries and probabilities are always ignored: no kernel of infd
quantizes queries or probabilities with a checkpoint's scales.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from infd.errors import CheckpointError
from infd.models.parameter import Parameter, Source

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint

# Suffixes that quantization tools append to the attention module's name: (key scale, value scale).
SPELLINGS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)
# Suffixes of the scales of queries and probabilities, which infd ignores, and of zero points, which are 0: schemes of
# caches with other zero points are refused (weights/encodings/compressed_tensors.py).
UNUSED = (
    "q_scale",
    "attn.q_scale",
    "q_proj.q_scale",
    "q_proj.output_scale",
    "prob_scale",
    "attn.prob_scale",
    "prob_output_scale",
    "q_zero_point",
    "k_zero_point",
    "v_zero_point",
)


class CacheScales(Parameter):
    """A parameter [2, K] float32: the divisors of the keys, then those of the values, by head."""

    __slots__ = ()

    def rows(self, first: int, count: int) -> None:
        """Return None, so that loading calls `place`, which also accepts one number for all heads."""

    def place(self, first: int, rows: torch.Tensor) -> None:
        if not bool(((rows > 0) & rows.isfinite()).all()):
            raise CheckpointError(f"{self.sources[first].name}: a cache's scale cannot be {rows.tolist()}")
        self.tensor[first].copy_(rows.flatten())


def stored_names(blueprint: Blueprint, name: str) -> tuple[str, ...]:
    """Return the checkpoint's names of the key and value scales of attention module `name`; () if there are none."""
    pairs = (tuple(f"{name}.{each}" for each in pair) for pair in SPELLINGS)
    return next((pair for pair in pairs if all(each in blueprint.stored for each in pair)), ())


def unused_names(blueprint: Blueprint, name: str) -> frozenset[str]:
    """Return the names of those checkpoint scales of attention module `name` that infd ignores."""
    return frozenset(f"{name}.{each}" for each in UNUSED).intersection(blueprint.stored)


def declare(blueprint: Blueprint, names: tuple[str, ...], kv_heads: int) -> CacheScales:
    """Declare the scales stored under `names`. Raises CheckpointError if one has neither 1 nor kv_heads elements."""
    shapes = [tuple(blueprint.stored[name].shape) for name in names]
    for name, shape in zip(names, shapes, strict=True):
        if prod(shape) not in (1, kv_heads):
            raise CheckpointError(f"{name}: expected one number, or {kv_heads}, found {list(shape)}")
    sources = tuple(Source(name, shape, row) for row, (name, shape) in enumerate(zip(names, shapes, strict=True)))
    scales = CacheScales((2, kv_heads), torch.float32, sources)
    blueprint.parameters.append(scales)
    return scales
