"""Block sizes of grouped products, and whether they fit a GPU's shared memory. Imports no triton.

The number of inputs of a block is the same in all tilings of a shape, so each output is the same chain of sums in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from msgspec import Struct

from infd.kernels.triton.blocks import KIB, LEAST

if TYPE_CHECKING:
    from infd.groups import Groups
    from infd.kernels.triton.blocks import Gpu

FEW: Final = 16  # routes of an expert, on average, up to which steps use the tile of few routes


class Tile(NamedTuple):
    """The block sizes of a grouped product, and the launch parameters of its programs.

    rows     routes of an expert
    outputs  rows of an expert's matrix; in a gated product half of them are of the gate, half of up
    warps    warps of a program
    stages   stages of Triton's software pipeline, which loads blocks of inputs ahead
    """

    rows: int
    outputs: int
    warps: int
    stages: int


class ExpertsTiling(Struct, frozen=True):
    """The tiles of steps in which experts have few routes on average, and of other steps."""

    few: Tile
    many: Tile


class ExpertsShape(NamedTuple):
    """The properties of a layer's experts that decide the tiling.

    chosen         experts of a token
    dtype          of activations
    gate_up, down  how the matrices are stored; None: in the activations' dtype
    """

    experts: int
    chosen: int
    hidden: int
    inner: int
    dtype: torch.dtype
    gate_up: Groups | None = None
    down: Groups | None = None

    @property
    def name(self) -> str:
        """Return the shape's name in the file of measured tilings."""
        stored = [_called(groups) for groups in dict.fromkeys((self.gate_up, self.down)) if groups is not None]
        sizes = f"{self.experts} experts of {self.hidden} x {self.inner}, {self.chosen} a token"
        return ", ".join((sizes, str(self.dtype).removeprefix("torch."), *stored))

    @property
    def block_inputs(self) -> int:
        """Return the inputs of a block."""
        return block_inputs(self.dtype, self.gate_up or self.down)

    def default_tiling(self, gpu: Gpu) -> ExpertsTiling:
        """Return the default tiling, reduced to fit the GPU's shared memory."""
        few, many = Tile(LEAST, 64, 4, 4), Tile(64, 128, 4, 3)
        if self.packed:  # decoding needs registers, two fields of a byte more than one
            four = any(groups is not None and groups.bits == 4 for groups in (self.gate_up, self.down))
            few, many = Tile(LEAST, 64, 4, 2), Tile(64, 32 if four else 64, 4, 2)
        elif self.dtype is torch.float32:
            many = Tile(64, 64, 4, 2)
        return ExpertsTiling(fitting(few, self, gpu), fitting(many, self, gpu))

    @property
    def packed(self) -> bool:
        """Return whether matrices are packed."""
        return self.gate_up is not None or self.down is not None

    @property
    def most_few(self) -> int:
        """Return the largest number of tokens for which the tile of few routes is used."""
        return FEW * self.experts // self.chosen

    def is_few(self, tokens: int) -> bool:
        """Return whether a step of `tokens` tokens uses the tile of few routes."""
        return tokens <= self.most_few


def block_inputs(dtype: torch.dtype, groups: Groups | None) -> int:
    """Return the inputs of a block of products with matrices that are stored in `groups`; None: in `dtype`."""
    if groups is not None:
        return 64
    return 32 if dtype is torch.float32 else 64


def needed(tile: Tile, shape: ExpertsShape) -> int:
    """Return an upper bound of a program's bytes of shared memory."""
    rows, outputs = (size * shape.block_inputs for size in (tile.rows, tile.outputs))
    floats = (rows + outputs) * shape.dtype.itemsize
    if not shape.packed:
        return tile.stages * floats + KIB
    # Loaded ahead: rows, bytes of the matrix, each weight's scale and minimum. Decoded weights come in addition.
    ahead = rows * shape.dtype.itemsize + 9 * outputs
    return floats + max(1, tile.stages - 1) * ahead + KIB


def fitting(tile: Tile, shape: ExpertsShape, gpu: Gpu) -> Tile:
    """Return `tile`, reduced until it fits: first fewer stages, then fewer outputs, then fewer rows."""
    while needed(tile, shape) > gpu.shared:
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.outputs > LEAST:
            tile = tile._replace(outputs=tile.outputs // 2)
        elif tile.rows > LEAST:
            tile = tile._replace(rows=tile.rows // 2)
        else:
            break
    return tile


def _called(groups: Groups) -> str:
    """Return a name of groups; it differs between groups that different kernels compute."""
    further = ("zeros", "minima", "order")
    kind = groups.table or f"int{groups.bits}"
    return " ".join((f"{kind} by {groups.inputs}", groups.scales, *(each for each in further if getattr(groups, each))))
