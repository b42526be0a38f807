"""The numbers by which a cache of 8-bit floats is divided, where a checkpoint has been calibrated for one.

One number for all heads of a layer, or one for each. Where the cache is of another type they are of no use, and unread;
so are those of queries and probabilities always, which no kernel here makes 8-bit floats by a checkpoint's numbers.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from infd.errors import CheckpointError
from infd.models.parameter import Parameter, Source

if TYPE_CHECKING:
    from infd.models.parameter import Blueprint

# Keys', then values', behind the name of a layer's attention, as one tool or another has written them.
SPELLINGS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)
# Of what attention computes and does not cache, likewise.
UNUSED = (
    "q_scale",
    "attn.q_scale",
    "q_proj.q_scale",
    "q_proj.output_scale",
    "prob_scale",
    "attn.prob_scale",
    "prob_output_scale",
)


class CacheScales(Parameter):
    """[2, K] float32: what keys, and values, of each head are divided by."""

    __slots__ = ()

    def rows(self, first: int, count: int) -> None:
        """None: one number may stand for all heads."""

    def place(self, first: int, rows: torch.Tensor) -> None:
        if not bool(((rows > 0) & rows.isfinite()).all()):
            raise CheckpointError(f"{self.sources[first].name}: a cache cannot be divided by {rows.tolist()}")
        self.tensor[first].copy_(rows.flatten())


def stored_names(blueprint: Blueprint, name: str) -> tuple[str, ...]:
    """Return what a checkpoint calls the scales of the attention called `name`; nothing where it has none."""
    pairs = (tuple(f"{name}.{each}" for each in pair) for pair in SPELLINGS)
    return next((pair for pair in pairs if all(each in blueprint.stored for each in pair)), ())


def unused_names(blueprint: Blueprint, name: str) -> frozenset[str]:
    """Return what a checkpoint calls the scales that the attention called `name` never needs."""
    return frozenset(f"{name}.{each}" for each in UNUSED).intersection(blueprint.stored)


def declare(blueprint: Blueprint, names: tuple[str, ...], kv_heads: int) -> CacheScales:
    """Declare scales of these names. Raises CheckpointError where there are too few or too many."""
    shapes = [tuple(blueprint.stored[name].shape) for name in names]
    for name, shape in zip(names, shapes, strict=True):
        if prod(shape) not in (1, kv_heads):
            raise CheckpointError(f"{name}: expected one number, or {kv_heads}, found {list(shape)}")
    sources = tuple(Source(name, shape, row) for row, (name, shape) in enumerate(zip(names, shapes, strict=True)))
    scales = CacheScales((2, kv_heads), torch.float32, sources)
    blueprint.parameters.append(scales)
    return scales
