"""Adapters by row on a GPU: all adapters of a step in two launches a product, whatever their ranks.

`shrink` multiplies the rows of each adapter by its A, `expand` the result by its
B. Where a group's rows and weights lie is read from two tables of addresses: one
for the step, one for the product and the adapters that change it. Each is sent
once and kept while it is asked for again, so that most launches send nothing. A table is well below 64 KiB: so much
CUDA takes at once even from memory that is not pinned.

In steps that are captured the groups are the device's slots, and there are as many tiles as there are rows; those that
a step has no use for have no rows, and their programs end at once.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.ops import LowRank

    Groups = Sequence[tuple[Tensor, LowRank]]

ROWS = 16  # of a tile: the fewest that a matrix product takes
KINDS = MappingProxyType({torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32})
KEPT = 4096  # tables of weights: those of a few dozen mixtures of adapters


@triton.jit
def _rows_of_tile(tiles, BLOCK_ROWS: tl.constexpr):
    """Return the group of a tile, its rows of x and y, where they stand in `shrunk`, and which of them there are."""
    tiles += tl.program_id(0) * 5
    first = tl.load(tiles + 2)
    at = first + tl.arange(0, BLOCK_ROWS)
    inside = at < tl.load(tiles + 3)
    rows = tl.load(tiles + 1).to(tl.pointer_type(tl.int64))
    return tl.load(tiles), tl.load(rows + at, mask=inside, other=0), tl.load(tiles + 4) + at, inside


@triton.jit
def shrink(
    x,
    shrunk,
    tiles,
    weights,
    x_row,
    INPUTS: tl.constexpr,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Put x A^T of one tile's rows into shrunk [rows, RANKS] float32."""
    if tl.load(tiles + tl.program_id(0) * 5 + 3) == 0:
        return
    group, row, place, inside = _rows_of_tile(tiles, BLOCK_ROWS)
    weights += group * WIDTH
    a = tl.load(weights).to(tl.pointer_type(KIND))
    ranks = tl.load(weights + 1)
    rank = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    result = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
    for first in range(0, INPUTS, BLOCK_INPUTS):
        column = first + tl.arange(0, BLOCK_INPUTS)
        wide = (column < INPUTS)[None, :]
        left = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside[:, None] & wide, other=0.0)
        right = tl.load(a + rank[:, None] * INPUTS + column[None, :], mask=(rank < ranks)[:, None] & wide, other=0.0)
        result = tl.dot(left, tl.trans(right), result, input_precision="ieee")
    within = inside[:, None] & (rank < RANKS)[None, :]
    tl.store(shrunk + place[:, None] * RANKS + rank[None, :], result, mask=within)


@triton.jit
def look_up(
    tokens,
    shrunk,
    tiles,
    weights,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Put A[token] of one tile's rows into shrunk [rows, RANKS] float32."""
    if tl.load(tiles + tl.program_id(0) * 5 + 3) == 0:
        return
    group, row, place, inside = _rows_of_tile(tiles, BLOCK_ROWS)
    weights += group * WIDTH
    a = tl.load(weights).to(tl.pointer_type(KIND))
    ranks = tl.load(weights + 1)
    rank = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    token = tl.load(tokens + row, mask=inside, other=0)
    there = inside[:, None] & (rank < ranks)[None, :]
    value = tl.load(a + token[:, None] * ranks + rank[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(shrunk + place[:, None] * RANKS + rank[None, :], value, mask=inside[:, None] & (rank < RANKS)[None, :])


@triton.jit
def expand(
    y,
    shrunk,
    tiles,
    weights,
    y_row,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Add one tile's rows of `shrunk`, times the B of one part, to some of the part's outputs.

    KIND  the type of B, which need not be y's: logits are float32
    """
    if tl.load(tiles + tl.program_id(0) * 5 + 3) == 0:
        return
    group, row, place, inside = _rows_of_tile(tiles, BLOCK_ROWS)
    weights += group * WIDTH + 2 + tl.program_id(1) * 5
    b = tl.load(weights).to(tl.pointer_type(KIND))
    first = tl.load(weights + 1)
    ranks = tl.load(weights + 2)
    output = tl.load(weights + 3)
    outputs = tl.load(weights + 4)
    column = tl.program_id(2) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    wide = column < outputs
    result = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for begin in range(0, ranks, BLOCK_RANKS):
        rank = begin + tl.arange(0, BLOCK_RANKS)
        deep = rank < ranks
        at = place[:, None] * RANKS + (first + rank)[None, :]
        left = tl.load(shrunk + at, mask=inside[:, None] & deep[None, :], other=0.0).to(KIND)
        right = tl.load(b + column[:, None] * ranks + rank[None, :], mask=wide[:, None] & deep[None, :], other=0.0)
        result = tl.dot(left, tl.trans(right), result, input_precision="ieee")
    target = y + row[:, None] * y_row + (output + column)[None, :]
    within = inside[:, None] & wide[None, :]
    total = tl.load(target, mask=within, other=0.0).to(tl.float32) + result
    tl.store(target, total.to(y.dtype.element_ty), mask=within)


class Tiles(NamedTuple):
    """The rows of a step's groups, cut into tiles.

    table  [tiles, 5] int64: group; the address of its rows; the tile's first row in them, and how many they are;
           where the group's rows begin among all
    rows   how many rows there are in all
    """

    table: Tensor
    rows: int


class Weights(NamedTuple):
    """What groups add to one product.

    table    [groups, 2 + 5 * parts] int64: the address of A, and its ranks; of each part the address of B, its first
             rank, how many, its first output, how many. A group with fewer parts than others has some of no outputs.
    ranks    the most of any A
    part     the most ranks of any part
    outputs  the most of any part
    parts    the most of any group
    dtype    of A and B
    """

    table: Tensor
    ranks: int
    part: int
    outputs: int
    parts: int
    dtype: torch.dtype

    @property
    def kind(self) -> tl.dtype:
        return KINDS[self.dtype]

    def become(self, other: Weights) -> bool:
        if self[1:] != other[1:] or self.table.shape != other.table.shape:
            return False
        self.table.copy_(other.table)
        return True


class Lora:
    """The lora family."""

    def __init__(self) -> None:
        self._tiles: tuple[tuple[int, ...], Tiles] | None = None  # of the step that was last asked for
        self._weights: OrderedDict[tuple[int, ...], Weights] = OrderedDict()

    def add(self, y: Tensor, x: Tensor, groups: Groups) -> None:
        _add(y, x, self._step(groups), self._product(groups))

    def add_rows(self, y: Tensor, tokens: Tensor, groups: Groups) -> None:
        _add_rows(y, tokens, self._step(groups), self._product(groups, table=True))

    def lasting(self, size: int, device: torch.device) -> Lasting:
        return Lasting(size, device)

    def _step(self, groups: Groups) -> Tiles:
        key = tuple(number for rows, _ in groups for number in (rows.data_ptr(), len(rows)))
        if self._tiles is None or self._tiles[0] != key:
            self._tiles = key, _cut([rows for rows, _ in groups])
        return self._tiles[1]

    def _product(self, groups: Groups, *, table: bool = False) -> Weights:
        """Return the table of these weights. It says nothing but addresses and sizes, and these are its key."""
        described = [_describe(low, table=table) for _, low in groups]
        key = tuple(number for each in described for number in (len(each), *each))
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = _gather(described, groups[0][1].a.device, groups[0][1].a.dtype)
            if len(self._weights) > KEPT:
                self._weights.popitem(last=False)
        self._weights.move_to_end(key)
        return found


class Lasting:
    """Adapters by row, of captured steps of one size. Its rows and tiles stay where they are."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._sent = torch.zeros(6 * size, dtype=torch.int64, device=device)
        self._tiles = Tiles(self._sent[size:].view(size, 5), size)

    def weigh(self, held: Sequence[LowRank | None], *, table: bool) -> Weights:
        kind = next(low.a.dtype for low in held if low is not None)
        return _gather([[] if low is None else _describe(low, table=table) for low in held], self._device, kind)

    def refill(self, slots: Sequence[int]) -> None:
        wanted = np.asarray(slots, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        found, first = np.unique(wanted[order], return_index=True)
        ends = [*first[1:].tolist(), len(slots)]
        address = self._sent.data_ptr()
        tiles = [
            (slot - 1, address + 8 * begin, at, end - begin, begin)
            for slot, begin, end in zip(found.tolist(), first.tolist(), ends, strict=True)
            if slot
            for at in range(0, end - begin, ROWS)
        ]
        sent = np.zeros(6 * self._size, dtype=np.int64)
        sent[: len(slots)] = order
        sent[self._size : self._size + 5 * len(tiles)] = np.array(tiles, dtype=np.int64).reshape(-1)
        self._sent.copy_(torch.from_numpy(sent), non_blocking=True)

    def add(self, y: Tensor, x: Tensor, weights: Weights) -> None:
        _add(y, x, self._tiles, weights)

    def add_rows(self, y: Tensor, tokens: Tensor, weights: Weights) -> None:
        _add_rows(y, tokens, self._tiles, weights)


def _add(y: Tensor, x: Tensor, tiles: Tiles, weights: Weights) -> None:
    assert y.stride(1) == x.stride(1) == 1
    shrunk = torch.empty((tiles.rows, weights.ranks), dtype=torch.float32, device=y.device)
    block = min(64, _power(weights.ranks))
    shrink[len(tiles.table), triton.cdiv(weights.ranks, block)](
        x,
        shrunk,
        tiles.table,
        weights.table,
        x.stride(0),
        INPUTS=x.shape[1],
        KIND=weights.kind,
        RANKS=weights.ranks,
        WIDTH=weights.table.shape[1],
        BLOCK_ROWS=ROWS,
        BLOCK_RANKS=block,
        BLOCK_INPUTS=64,
    )
    _expand(y, shrunk, tiles, weights)


def _add_rows(y: Tensor, tokens: Tensor, tiles: Tiles, weights: Weights) -> None:
    shrunk = torch.empty((tiles.rows, weights.ranks), dtype=torch.float32, device=y.device)
    block = min(64, _power(weights.ranks))
    look_up[len(tiles.table), triton.cdiv(weights.ranks, block)](
        tokens,
        shrunk,
        tiles.table,
        weights.table,
        KIND=weights.kind,
        RANKS=weights.ranks,
        WIDTH=weights.table.shape[1],
        BLOCK_ROWS=ROWS,
        BLOCK_RANKS=block,
    )
    _expand(y, shrunk, tiles, weights)


def _expand(y: Tensor, shrunk: Tensor, tiles: Tiles, weights: Weights) -> None:
    block = min(64, _power(weights.outputs))
    expand[len(tiles.table), weights.parts, triton.cdiv(weights.outputs, block)](
        y,
        shrunk,
        tiles.table,
        weights.table,
        y.stride(0),
        KIND=weights.kind,
        RANKS=weights.ranks,
        WIDTH=weights.table.shape[1],
        BLOCK_ROWS=ROWS,
        BLOCK_RANKS=min(32, _power(weights.part)),
        BLOCK_OUTPUTS=block,
    )


def _describe(low: LowRank, *, table: bool) -> list[int]:
    """Return a group's row of `Weights.table`, without padding."""
    assert low.a.is_contiguous()
    row = [low.a.data_ptr(), low.a.shape[1 if table else 0]]
    for b, rank, output in low.parts:
        assert b.is_contiguous()
        row += [b.data_ptr(), rank, b.shape[1], output, b.shape[0]]
    return row


def _gather(rows: list[list[int]], device: torch.device, dtype: torch.dtype) -> Weights:
    width = max(map(len, rows))
    table = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
    return Weights(
        torch.from_numpy(table).to(device, non_blocking=True),
        ranks=int(table[:, 1].max()),
        part=int(table[:, 4::5].max()),
        outputs=int(table[:, 6::5].max()),
        parts=(width - 2) // 5,
        dtype=dtype,
    )


def _cut(groups: list[Tensor]) -> Tiles:
    table, base = [], 0
    for group, rows in enumerate(groups):
        table += [(group, rows.data_ptr(), first, len(rows), base) for first in range(0, len(rows), ROWS)]
        base += len(rows)
    sent = torch.from_numpy(np.array(table, dtype=np.int64)).to(groups[0].device, non_blocking=True)
    return Tiles(sent, base)


def _power(number: int) -> int:
    return max(16, triton.next_power_of_2(number))
