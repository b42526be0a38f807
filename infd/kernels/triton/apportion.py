"""Split the keys of captured attention steps on the device, since only the device has the true lengths.

A captured step has a fixed grid of the largest possible number of splits: one per span, plus as many as
the device computes in parallel. In each step splits are distributed in proportion to keys, as `tiles.py` does on the
host for uncaptured steps; unused splits have no queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.triton.tiles import TileTable

if TYPE_CHECKING:
    from infd.kernels.families.attention import AttentionBatch
    from infd.kernels.triton.blocks import Tiling
    from infd.kernels.triton.tiles import Shape

SPANS, SPLITS = 128, 64  # spans and splits in one block


@triton.jit
def _keys(starts, span, size, QUERIES: tl.constexpr, WINDOW: tl.constexpr):
    """Return the number of keys to which the queries of `span` attend; 0 past the last span."""
    inside = span < size
    keys = tl.load(starts + span, mask=inside, other=0) + QUERIES
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + QUERIES - 1)
    return tl.where(inside, keys, 0)


@triton.jit(do_not_specialize=["size", "most", "programs"])
def apportion(
    starts,
    tiles,
    firsts,
    size,
    most,
    programs,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_SPANS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Write a block of rows of `tiles` [most, 6] int32, one `KeySplit` each, and `firsts` [size] int32.

    starts  [size] int32: position of each span's first query
    LEAST   fewest keys in a split
    """
    total = tl.zeros([BLOCK_SPANS], tl.int64)
    for first in range(0, size, BLOCK_SPANS):
        total += _keys(starts, first + tl.arange(0, BLOCK_SPANS), size, QUERIES, WINDOW).to(tl.int64)
    share = tl.maximum(tl.cdiv(tl.sum(total, 0) * KV_HEADS, programs), LEAST).to(tl.int32)

    # Row r belongs to the first span whose splits end after r; this span's splits begin where the previous span's end.
    row = tl.program_id(0) * BLOCK_SPLITS + tl.arange(0, BLOCK_SPLITS)
    span = tl.zeros([BLOCK_SPLITS], tl.int32)
    begin = tl.zeros([BLOCK_SPLITS], tl.int32)
    end = tl.full([BLOCK_SPLITS], 0x7FFFFFFF, tl.int32)
    behind = 0
    for first in range(0, size, BLOCK_SPANS):
        each = first + tl.arange(0, BLOCK_SPANS)
        splits = tl.cdiv(_keys(starts, each, size, QUERIES, WINDOW), share)
        ends = behind + tl.cumsum(splits, 0)
        behind += tl.sum(splits, 0)
        if tl.program_id(0) == 0:
            tl.store(firsts + each, ends - splits, mask=each < size)
        earlier = (ends[None, :] <= row[:, None]) & (each < size)[None, :]
        span += tl.sum(earlier.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(earlier, ends[None, :], 0), 1))
        later = (ends[None, :] > row[:, None]) & (each < size)[None, :]
        end = tl.minimum(end, tl.min(tl.where(later, ends[None, :], 0x7FFFFFFF), 1))

    used = row < behind
    valid = row < most
    tiles += row * 6
    tl.store(tiles, tl.where(used, span, 0), mask=valid)
    tl.store(tiles + 1, tl.where(used, span * QUERIES, 0), mask=valid)
    tl.store(tiles + 2, tl.zeros([BLOCK_SPLITS], tl.int32), mask=valid)
    tl.store(tiles + 3, tl.where(used, QUERIES, 0), mask=valid)
    tl.store(tiles + 4, tl.where(used, row - begin, 0), mask=valid)
    tl.store(tiles + 5, tl.where(used, end - begin, 0), mask=valid)


class Apportioned:
    """The tiles of steps whose spans have equally many queries, few enough that one tile contains a span.

    tile_table  the tiles that `attend` and `merge` read, at fixed addresses
    """

    def __init__(self, batch: AttentionBatch, shape: Shape, tiling: Tiling, programs: int) -> None:
        size, queries = len(batch.counts), batch.counts[0]
        assert batch.counts == [queries] * size
        assert len(batch.slots) == size * queries
        blocks = tiling.few if queries * shape.shared <= tiling.few.rows else tiling.many
        assert queries * shape.shared <= blocks.rows
        # At most programs / kv_heads full splits, and one shorter split per span.
        most = size + programs // shape.kv_heads
        tiles = torch.empty((most, 6), dtype=torch.int32, device=batch.start.device)
        firsts = torch.empty(size, dtype=torch.int32, device=batch.start.device)
        self.tile_table = TileTable(blocks, tiles, firsts, queries)
        self._batch, self._shape, self._programs = batch, shape, programs
        self._least_keys = tiling.least_keys

    def renew(self) -> None:
        """Compute `tile_table` on the device for the batch's current positions."""
        batch, (_, tiles, firsts, queries) = self._batch, self.tile_table
        assert firsts is not None
        apportion[(triton.cdiv(len(tiles), SPLITS),)](
            batch.start,
            tiles,
            firsts,
            len(firsts),
            len(tiles),
            self._programs,
            KV_HEADS=self._shape.kv_heads,
            QUERIES=queries,
            WINDOW=batch.window or 0,
            LEAST=self._least_keys,
            BLOCK_SPANS=SPANS,
            BLOCK_SPLITS=SPLITS,
        )
