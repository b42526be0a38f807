"""LoRA on a GPU: all adapters of a step in two launches per product, for any mixture of ranks.

`shrink` multiplies each row by its adapter's A, `expand` the result by the adapter's B. The kernels read addresses of
rows and weights from two tables: one for the step (`Tiles`), one for a product and the adapters that change it
(`Weights`). A table is uploaded once and reused, so that most launches upload nothing.

In captured steps each device slot is a group, and there are as many tiles as rows; the programs of unused tiles exit at
once. The tables cover all slots, and ranks up to a power of two, so that another adapter seldom requires another graph.

Of the compile-time constants, only the number of ranks in a block, 16, 32 or 64, depends on the adapters' ranks. So a
step with several adapters uses only kernels that steps with one of these adapters also use.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from infd.kernels.families.adapters import ALIGNED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.adapters import LowRank

    Array = npt.NDArray[Any]
    Groups = Sequence[tuple[Tensor, LowRank]]
    Upload = Callable[[Array], Tensor]
    Fill = Callable[[Tensor, Array], None]

ROWS = 16  # rows of a tile: the fewest that a matrix product supports
LEAST, MOST = 16, 64  # fewest and most ranks in a block; MOST is also the number of outputs in a block
EXPANDED = 32  # most ranks that `expand` multiplies at a time
HEADING, PART = 3, 6  # integers of `Weights.table` for A, and for each part
KINDS = MappingProxyType({torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32})
CACHED_TABLES = 4096  # most weight tables kept: enough for a few dozen mixtures of adapters
CACHED_TILES = 64  # most tables of tiles kept; a step has one for each set of adapters that change the same product


@triton.jit
def _rows_of_tile(tiles, BLOCK_ROWS: tl.constexpr):
    """Return the tile's group, its rows of x and y, their indices in `shrunk`, and the mask of valid rows."""
    tiles += tl.program_id(0) * 5
    first = tl.load(tiles + 2)
    at = first + tl.arange(0, BLOCK_ROWS)
    inside = at < tl.load(tiles + 3)
    rows = tl.load(tiles + 1).to(tl.pointer_type(tl.int64))
    return tl.load(tiles), tl.load(rows + at, mask=inside, other=0), tl.load(tiles + 4) + at, inside


@triton.jit
def _matrix(weights, KIND: tl.constexpr):
    """Return a matrix's address, 16-byte aligned, and the stride of its rows, a multiple of 8."""
    begin = tl.load(weights).to(tl.pointer_type(KIND))
    return tl.multiple_of(begin, 16), tl.load(weights + 1) * 8


@triton.jit(do_not_specialize=["tiles", "weights", "width"])
def shrink(
    x,
    shrunk,
    tiles,
    weights,
    width,
    x_row,
    shrunk_row,
    inputs,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Write x A^T of one tile's rows to shrunk [rows, ranks] float32. KIND: dtype of A."""
    if tl.load(tiles + tl.program_id(0) * 5 + 3) == 0:
        return
    group, row, place, inside = _rows_of_tile(tiles, BLOCK_ROWS)
    weights += group * width
    ranks = tl.load(weights + 2)
    if tl.program_id(1) * BLOCK_RANKS >= ranks:
        return
    a, a_row = _matrix(weights, KIND)
    rank = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    result = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
    for first in range(0, inputs, BLOCK_INPUTS):
        column = first + tl.arange(0, BLOCK_INPUTS)
        wide = (column < inputs)[None, :]
        left = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside[:, None] & wide, other=0.0)
        right = tl.load(a + rank[:, None] * a_row + column[None, :], mask=(rank < ranks)[:, None] & wide, other=0.0)
        result = tl.dot(left, tl.trans(right), result, input_precision="ieee")
    tl.store(shrunk + place[:, None] * shrunk_row + rank[None, :], result, mask=inside[:, None])


@triton.jit(do_not_specialize=["tiles", "weights", "width"])
def look_up(
    tokens,
    shrunk,
    tiles,
    weights,
    width,
    shrunk_row,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Write A[token] of one tile's rows to shrunk [rows, ranks] float32. KIND: dtype of A."""
    if tl.load(tiles + tl.program_id(0) * 5 + 3) == 0:
        return
    group, row, place, inside = _rows_of_tile(tiles, BLOCK_ROWS)
    weights += group * width
    ranks = tl.load(weights + 2)
    if tl.program_id(1) * BLOCK_RANKS >= ranks:
        return
    a, a_row = _matrix(weights, KIND)
    rank = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    token = tl.load(tokens + row, mask=inside, other=0)
    valid = inside[:, None] & (rank < ranks)[None, :]
    value = tl.load(a + token[:, None] * a_row + rank[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(shrunk + place[:, None] * shrunk_row + rank[None, :], value, mask=inside[:, None])


@triton.jit(do_not_specialize=["tiles", "weights", "width"])
def expand(
    y,
    shrunk,
    tiles,
    weights,
    width,
    y_row,
    shrunk_row,
    KIND: tl.constexpr,
    HEADING: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Add one tile's rows of `shrunk`, times one part's B transposed, to a block of the part's outputs.

    KIND  dtype of B, which may differ from y's: logits are float32
    """
    if tl.load(tiles + tl.program_id(0) * 5 + 3) == 0:
        return
    group, row, place, inside = _rows_of_tile(tiles, BLOCK_ROWS)
    weights += group * width + HEADING + tl.program_id(1) * PART
    outputs = tl.load(weights + 5)
    if tl.program_id(2) * BLOCK_OUTPUTS >= outputs:
        return
    b, b_row = _matrix(weights, KIND)
    first = tl.load(weights + 2)
    ranks = tl.load(weights + 3)
    output = tl.load(weights + 4)
    column = tl.program_id(2) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    wide = column < outputs
    result = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
    for begin in range(0, ranks, BLOCK_RANKS):
        rank = begin + tl.arange(0, BLOCK_RANKS)
        deep = rank < ranks
        loaded = rank < tl.cdiv(ranks, 8) * 8  # includes the zero padding of B's rows, so that loads are vectorized
        at = place[:, None] * shrunk_row + (first + rank)[None, :]
        left = tl.load(shrunk + at, mask=inside[:, None] & deep[None, :], other=0.0).to(KIND)
        right = tl.load(b + column[:, None] * b_row + rank[None, :], mask=wide[:, None] & loaded[None, :], other=0.0)
        result = tl.dot(left, tl.trans(right), result, input_precision="ieee")
    target = y + row[:, None] * y_row + (output + column)[None, :]
    within = inside[:, None] & wide[None, :]
    total = tl.load(target, mask=within, other=0.0).to(tl.float32) + result
    tl.store(target, total.to(y.dtype.element_ty), mask=within)


class Tiles(NamedTuple):
    """The rows of a step's groups, split into tiles.

    table  [tiles, 5] int64: group, address of the group's rows, first row of the tile, number of rows of the group,
           index of the group's first row in `shrunk`
    rows   number of rows of all groups
    """

    table: Tensor
    rows: int


class Weights(NamedTuple):
    """The low-rank matrices that groups add to one product.

    table    [groups, HEADING + PART * parts] int64. Heading: address of A, its row stride / 8, its ranks. Each part:
             address of B, its row stride / 8, first rank, ranks, first output, outputs. Missing parts have 0 outputs.
    ranks    upper bound of the ranks of any A
    outputs  upper bound of the outputs of any part
    dtype    of A and B
    """

    table: Tensor
    ranks: int
    outputs: int
    dtype: torch.dtype

    @property
    def parts(self) -> int:
        """Return the number of parts of a group."""
        return (self.table.shape[1] - HEADING) // PART

    @property
    def kind(self) -> tl.dtype:
        """Return the dtype of A and B, as a Triton dtype."""
        return KINDS[self.dtype]

    @property
    def block(self) -> int:
        """Return the number of ranks in a block."""
        return min(MOST, max(LEAST, triton.next_power_of_2(self.ranks)))


class Lora:
    """Implements families.adapters.Lora."""

    def __init__(self) -> None:
        self._tiles: OrderedDict[tuple[int, ...], Tiles] = OrderedDict()
        self._weights: OrderedDict[tuple[int, ...], Weights] = OrderedDict()

    def add(self, y: Tensor, x: Tensor, groups: Groups, upload: Upload | None = None) -> None:
        _add(y, x, self._step(groups, upload), self._product(groups, upload))

    def add_rows(self, y: Tensor, tokens: Tensor, groups: Groups, upload: Upload | None = None) -> None:
        _add_rows(y, tokens, self._step(groups, upload), self._product(groups, upload, table=True))

    def captured(self, size: int, device: torch.device) -> CapturedLora:
        return CapturedLora(size, device)

    def _step(self, groups: Groups, upload: Upload | None = None) -> Tiles:
        """Return the tiles of these rows, cached by address and size: the table depends on nothing else."""
        key = tuple(number for rows, _ in groups for number in (rows.data_ptr(), len(rows)))
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = _cut([rows for rows, _ in groups], upload)
            if len(self._tiles) > CACHED_TILES:
                self._tiles.popitem(last=False)
        self._tiles.move_to_end(key)
        return found

    def _product(self, groups: Groups, upload: Upload | None = None, *, table: bool = False) -> Weights:
        """Return the table of these weights, cached by addresses and sizes: the table depends on nothing else."""
        described = [_describe(low, table=table) for _, low in groups]
        key = tuple(number for each in described for number in (len(each), *each))
        found = self._weights.get(key)
        if found is None:
            parts, (ranks, outputs) = max(len(low.parts) for _, low in groups), _sizes(described)
            a = groups[0][1].a
            sent = _sent(_rows(described, parts), a.device, upload)
            found = self._weights[key] = Weights(sent, ranks, outputs, a.dtype)
            if len(self._weights) > CACHED_TABLES:
                self._weights.popitem(last=False)
        self._weights.move_to_end(key)
        return found


class CapturedLora:
    """LoRA for captured steps of one batch size. Implements families.adapters.CapturedLora at fixed addresses."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._sent = torch.zeros(6 * size, dtype=torch.int64, device=device)
        self._tiles = Tiles(self._sent[size:].view(size, 5), size)

    def slot_weights(
        self, by_slot: Sequence[LowRank | None], outputs: Sequence[int], *, table: bool, upload: Upload
    ) -> SlotWeights:
        return SlotWeights(by_slot, outputs, table=table, upload=upload)

    def refill(self, slots: Sequence[int], fill: Fill) -> None:
        slot_of_row = np.asarray(slots, dtype=np.int64)
        order = np.argsort(slot_of_row, kind="stable")
        found, first = np.unique(slot_of_row[order], return_index=True)
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
        fill(self._sent, sent)

    def add(self, y: Tensor, x: Tensor, weights: SlotWeights) -> None:
        _add(y, x, self._tiles, weights.weights)

    def add_rows(self, y: Tensor, tokens: Tensor, weights: SlotWeights) -> None:
        _add_rows(y, tokens, self._tiles, weights.weights)


class SlotWeights:
    """The adapters' weights for one product, at fixed addresses. Every slot may change every part."""

    def __init__(
        self, by_slot: Sequence[LowRank | None], outputs: Sequence[int], *, table: bool, upload: Upload
    ) -> None:
        """outputs: number of outputs of each module of the product."""
        self._is_table = table
        self._parts = len(outputs)
        described = self._describe(by_slot)
        ranks = max(LEAST, triton.next_power_of_2(_sizes(described)[0]))
        dtype = next(low.a.dtype for low in by_slot if low is not None)
        self.weights = Weights(upload(_rows(described, self._parts)), ranks, max(outputs), dtype)

    def replace(self, by_slot: Sequence[LowRank | None], fill: Fill) -> bool:
        described = self._describe(by_slot)
        if _sizes(described)[0] > self.weights.ranks:
            return False
        fill(self.weights.table.view(-1), _rows(described, self._parts).reshape(-1))
        return True

    def _describe(self, by_slot: Sequence[LowRank | None]) -> list[list[int]]:
        return [[] if low is None else _describe(low, table=self._is_table) for low in by_slot]


def _add(y: Tensor, x: Tensor, tiles: Tiles, weights: Weights) -> None:
    assert y.stride(1) == x.stride(1) == 1
    shrunk = _shrunk(y, tiles, weights)
    shrink[len(tiles.table), shrunk.shape[1] // weights.block](
        x,
        shrunk,
        tiles.table,
        weights.table,
        weights.table.shape[1],
        x.stride(0),
        shrunk.stride(0),
        x.shape[1],
        KIND=weights.kind,
        BLOCK_ROWS=ROWS,
        BLOCK_RANKS=weights.block,
        BLOCK_INPUTS=64,
    )
    _expand(y, shrunk, tiles, weights)


def _add_rows(y: Tensor, tokens: Tensor, tiles: Tiles, weights: Weights) -> None:
    shrunk = _shrunk(y, tiles, weights)
    look_up[len(tiles.table), shrunk.shape[1] // weights.block](
        tokens,
        shrunk,
        tiles.table,
        weights.table,
        weights.table.shape[1],
        shrunk.stride(0),
        KIND=weights.kind,
        BLOCK_ROWS=ROWS,
        BLOCK_RANKS=weights.block,
    )
    _expand(y, shrunk, tiles, weights)


def _shrunk(y: Tensor, tiles: Tiles, weights: Weights) -> Tensor:
    """Return uninitialized memory for the shrunk rows, with ranks padded to whole blocks."""
    ranks = triton.cdiv(weights.ranks, weights.block) * weights.block
    return torch.empty((tiles.rows, ranks), dtype=torch.float32, device=y.device)


def _expand(y: Tensor, shrunk: Tensor, tiles: Tiles, weights: Weights) -> None:
    expand[len(tiles.table), weights.parts, triton.cdiv(weights.outputs, MOST)](
        y,
        shrunk,
        tiles.table,
        weights.table,
        weights.table.shape[1],
        y.stride(0),
        shrunk.stride(0),
        KIND=weights.kind,
        HEADING=HEADING,
        PART=PART,
        BLOCK_ROWS=ROWS,
        BLOCK_RANKS=min(EXPANDED, weights.block),
        BLOCK_OUTPUTS=MOST,
    )


def _describe(low: LowRank, *, table: bool) -> list[int]:
    """Return a group's row of `Weights.table`, without padding."""
    row = [*_placed(low.a), low.a.shape[1 if table else 0]]
    for b, rank, output in low.parts:
        row += [*_placed(b), rank, b.shape[1], output, b.shape[0]]
    return row


def _placed(matrix: Tensor) -> tuple[int, int]:
    """Return a matrix's address, and its row stride / 8."""
    stride, odd = divmod(matrix.stride(0), ALIGNED)
    assert matrix.stride(1) == 1
    assert odd == matrix.data_ptr() % 16 == 0, "rows of an adapter's matrices must begin at multiples of 8 elements"
    return matrix.data_ptr(), stride


def _sizes(described: list[list[int]]) -> tuple[int, int]:
    """Return the largest number of ranks of any A, and of outputs of any part."""
    ranks = max((row[HEADING - 1] for row in described if row), default=0)
    return ranks, max((outputs for row in described for outputs in row[HEADING + PART - 1 :: PART]), default=0)


def _rows(described: list[list[int]], parts: int) -> Array:
    width = HEADING + PART * parts
    return np.array([row + [0] * (width - len(row)) for row in described], dtype=np.int64)


def _cut(groups: list[Tensor], upload: Upload | None) -> Tiles:
    table, base = [], 0
    for group, rows in enumerate(groups):
        table += [(group, rows.data_ptr(), first, len(rows), base) for first in range(0, len(rows), ROWS)]
        base += len(rows)
    return Tiles(_sent(np.array(table, dtype=np.int64), groups[0].device, upload), base)


def _sent(array: Array, device: torch.device, upload: Upload | None) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True) if upload is None else upload(array)
