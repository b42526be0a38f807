"""Attention without a cache on a GPU: a program computes some queries of one span for one head."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from infd.kernels.families.span_attention import WHOLE, packed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from infd.kernels.families.span_attention import Reach, SpanBatch

QUERIES = 64  # of a program
KEYS = 32  # of a block
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["before", "after", "furthest"])
def attend(
    q,
    k,
    v,
    out,
    bias,
    tiles,
    q_row,
    k_row,
    v_row,
    scale,
    before,
    after,
    furthest,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend the queries of a tile to the keys of its span.

    tiles          [tiles, 5]: the first query, the end of the queries, the first key, the end of the keys; the first
                   query's row in q and out
    before, after  most tokens between a query and the keys that it sees; -1: any number
    scale          multiplies q·k, for powers of two
    bias           see families/span_attention.py; read if BIASED
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(tiles + 5 * tile)
    end = tl.load(tiles + 5 * tile + 1)
    first = tl.load(tiles + 5 * tile + 2)
    stop = tl.load(tiles + 5 * tile + 3)
    row = tl.load(tiles + 5 * tile + 4) + tl.arange(0, BLOCK_Q)
    if before >= 0:
        first = tl.maximum(first, begin - before)
    if after >= 0:
        stop = tl.minimum(stop, end + after)
    query = begin + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_D)
    inside = column < SIZE
    rows = tl.load(
        q + row.to(tl.int64)[:, None] * q_row + head * SIZE + column[None, :],
        mask=(query < end)[:, None] & inside[None, :],
        other=0.0,
    )
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    shift = (head // GROUP) * SIZE
    for at in range(first, stop, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        within = (key < stop)[:, None] & inside[None, :]
        keys = tl.load(k + key.to(tl.int64)[:, None] * k_row + shift + column[None, :], mask=within, other=0.0)
        values = tl.load(v + key.to(tl.int64)[:, None] * v_row + shift + column[None, :], mask=within, other=0.0)
        scores = tl.dot(rows, tl.trans(keys), input_precision="ieee") * scale
        distance = key[None, :] - query[:, None]
        if BIASED:
            bounded = tl.minimum(tl.maximum(distance, -furthest), furthest)
            added = tl.load(bias + head * (2 * furthest + 1) + furthest + bounded)
            scores += added * 1.4426950408889634
        near = ((before < 0) | (distance >= -before)) & ((after < 0) | (distance <= after))
        seen = (key < stop)[None, :] & near
        scores = tl.where(seen, scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(most == float("-inf"), 0.0, most)  # no key of the row was seen yet
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        sums = sums * shrink[:, None] + product
        largest = most
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + (row.to(tl.int64)[:, None] * HEADS + head) * SIZE + column[None, :],
        result.to(out.dtype.element_ty),
        mask=(query < end)[:, None] & inside[None, :],
    )


class SpanAttention:
    """Implements families.span_attention.SpanAttention."""

    def prepare(self, batch: SpanBatch) -> Plan:
        return Plan(batch)


class Plan:
    """Implements families.span_attention.SpanPlan."""

    def __init__(self, batch: SpanBatch) -> None:
        tiles = np.array(list(_tiles(batch)), dtype=np.int32).reshape(-1, 5)
        self._tiles = torch.from_numpy(tiles).to(batch.device)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, reach: Reach = WHOLE, bias: Tensor | None = None
    ) -> Tensor:
        q, k, v = (packed(x) for x in (q, k, v))
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        block = max(16, triton.next_power_of_2(q.shape[2]))
        wide = block * q.element_size() > 128
        if len(self._tiles):
            attend[len(self._tiles), q.shape[1]](
                q,
                k,
                v,
                out,
                out if bias is None else bias,
                self._tiles,
                q.stride(0),
                k.stride(0),
                v.stride(0),
                scale * LOG2_E,
                -1 if reach.before is None else reach.before,
                -1 if reach.after is None else reach.after,
                0 if bias is None else bias.shape[1] // 2,
                HEADS=q.shape[1],
                GROUP=q.shape[1] // k.shape[1],
                SIZE=q.shape[2],
                BIASED=bias is not None,
                BLOCK_Q=QUERIES,
                BLOCK_K=KEYS,
                BLOCK_D=block,
                # A row of a large head takes the registers of twice as many threads, and more shared memory.
                num_warps=8 if wide else 4,
                num_stages=2 if wide else 3,
            )
        return out


def _tiles(batch: SpanBatch) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the argument `tiles` of `attend`, tile by tile."""
    if batch.queries is None:
        for first, end in pairwise(batch.offsets):
            for begin in range(first, end, QUERIES):
                yield begin, min(begin + QUERIES, end), first, end, begin
        return
    for row, query in enumerate(batch.queries):
        span = bisect_right(batch.offsets, query)
        yield query, query + 1, batch.offsets[span - 1], batch.offsets[span], row
