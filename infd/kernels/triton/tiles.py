"""Split a step's attention into tiles: a few queries of one span, for all query heads of one key head.

If the device can run more programs in parallel than there are tiles, each tile's keys are divided into splits of
similar length, computed in parallel and merged. Examples are few decoding sequences, or a short prompt after a long
prefix. The host computes the splits from upper bounds of the sequences' lengths; in captured steps the device computes
the splits from the true lengths (`apportion.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton

from infd.kernels.triton.blocks import LEAST, Blocks, Tiling, fitting
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch
    from infd.kernels.triton.blocks import Gpu


class KeySplit(NamedTuple):
    """One split of a tile's keys: a row of `tiles`.

    span     index of the span; arbitrary for padding, whose `splits` is 0
    token    index in the step of the tile's first query
    first    index in the span of the tile's first query
    queries  number of queries
    split    index among the tile's splits
    splits   number of the tile's splits
    """

    span: int
    token: int
    first: int
    queries: int
    split: int
    splits: int


class Shape(NamedTuple):
    """The head shape that decides the tiling.

    kv_heads  number of key heads
    shared    number of query heads per key head
    head      head size
    dtype     of queries
    narrow    whether the cache's dtype is narrower than the queries', so that converting keys takes registers
    """

    kv_heads: int
    shared: int
    head: int
    dtype: torch.dtype
    narrow: bool = False

    @property
    def name(self) -> str:
        """Return the shape's name in the file of measured tilings."""
        narrow = ", narrow" if self.narrow else ""
        heads = f"{self.kv_heads} x {self.shared} heads of {self.head}"
        return f"{heads}, {str(self.dtype).removeprefix('torch.')}{narrow}"

    @property
    def block_head(self) -> int:
        """Return the head size, padded to a power of two."""
        return max(LEAST, triton.next_power_of_2(self.head))

    @property
    def least_rows(self) -> int:
        """Return the rows of the smallest tile: one query, for all query heads of a key head."""
        return max(LEAST, triton.next_power_of_2(self.shared))

    def default_tiling(self, gpu: Gpu) -> Tiling:
        """Return the default tiling, reduced to fit the GPU's shared memory if possible."""
        few, many = self._few(), self._many()
        fit = partial(fitting, least_rows=self.least_rows, block_head=self.block_head, itemsize=self.dtype.itemsize)
        return Tiling(fit(few, gpu=gpu) or few, fit(many, gpu=gpu) or many)

    def _few(self) -> Blocks:
        """Return blocks for few queries: many keys per block, since reading keys takes most of the time."""
        if self.dtype is torch.float32:
            return Blocks(self.least_rows, 32, 8, 2)
        if self.block_head > 128:
            return Blocks(self.least_rows, 32, 8 if self.narrow else 4, 2)
        return Blocks(self.least_rows, 64, 4, 3)

    def _many(self) -> Blocks:
        if self.dtype is torch.float32:
            return self._few()  # float32 products need many registers
        if self.block_head > 128:
            return Blocks(max(64, self.least_rows), 16 if self.narrow else 32, 8, 2)
        return Blocks(max(128, self.least_rows), 64, 8, 3)


class TileTable(NamedTuple):
    """The tiles of one block size.

    tiles         [splits, 6] int32, as `attend` reads them
    firsts        [tiles] int32, as `merge` reads them; None if no tile has several splits
    most_queries  number of queries of the largest tile
    """

    blocks: Blocks
    tiles: Tensor
    firsts: Tensor | None
    most_queries: int


class _Splitting(NamedTuple):
    """The parameters by which the keys of tiles are split.

    programs    number of programs that the device runs in parallel
    kv_heads    number of programs per split
    least_keys  fewest keys per split
    """

    programs: int
    kv_heads: int
    least_keys: int

    def counts(self, keys: list[int]) -> list[int]:
        """Return each tile's number of splits, given its number of keys."""
        share = max(self.least_keys, ceil_div(sum(keys) * self.kv_heads, self.programs))
        return [ceil_div(count, share) for count in keys]


def tile_step(batch: AttentionBatch, shape: Shape, tiling: Tiling, programs: int) -> Iterable[TileTable]:
    """Divide a step into tiles: small tiles for spans of few queries, large tiles for other spans.

    programs  number of programs that the device runs in parallel
    """
    few = tiling.few.rows // shape.shared
    spans = range(len(batch.counts))
    padding = len(batch.slots) - batch.offsets[-1]
    short = [span for span in spans if batch.counts[span] <= few]
    long = [span for span in spans if batch.counts[span] > few]
    splitting = _Splitting(programs, shape.kv_heads, tiling.least_keys)
    yield from _tile_table(batch, tiling.few, shape.shared, short, padding, splitting)
    yield from _tile_table(batch, tiling.many, shape.shared, long, 0, splitting)


def _tile_table(
    batch: AttentionBatch, blocks: Blocks, shared: int, spans: list[int], padding: int, splitting: _Splitting
) -> Iterable[TileTable]:
    most = blocks.rows // shared
    tiles = [
        (span, batch.offsets[span] + first, first, min(most, batch.counts[span] - first))
        for span in spans
        for first in range(0, batch.counts[span], most)
    ]
    splits = splitting.counts([_key_bound(batch, span, first, queries) for span, _, first, queries in tiles])
    end = batch.offsets[-1]
    tiles += [(0, end + first, 0, min(most, padding - first)) for first in range(0, padding, most)]
    splits += [0] * (len(tiles) - len(splits))
    if not tiles:
        return
    rows = [
        KeySplit(*tile, split, count)
        for tile, count in zip(tiles, splits, strict=True)
        for split in range(max(1, count))
    ]
    firsts: list[int] = []
    if max(splits) > 1:
        firsts = np.cumsum([0, *(max(1, count) for count in splits[:-1])]).tolist()
    uploaded = batch.up(np.array([*np.array(rows).ravel(), *firsts], dtype=np.int32))
    table, rest = uploaded[: 6 * len(rows)].view(-1, 6), uploaded[6 * len(rows) :]
    yield TileTable(blocks, table, rest if len(rest) else None, max(tile[3] for tile in tiles))


def _key_bound(batch: AttentionBatch, span: int, first: int, queries: int) -> int:
    """Return an upper bound of the number of keys to which a tile's queries attend."""
    every = batch.starts[span] + first + queries
    return every if batch.window is None else min(every, batch.window + queries - 1)
