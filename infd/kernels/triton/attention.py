"""Paged attention on a GPU: one kernel for any mix of query lengths.

Work is cut into tiles: some queries of one span, for all heads that share a
key-value head. Queries and heads together are the rows of one matrix product.
Where tiles are fewer than the device has room for, the keys of each are split
into parts of similar length, computed side by side and merged: that is the case
of few sequences decoding, but a short prompt behind a long one is no other.

The host cuts tiles and counts parts by its upper bounds; where a part begins
and ends is worked out on the device, from the true lengths. What changes from
step to step is kept out of the types that Triton compiles for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from infd.kernels.ops import AttentionBatch, KeyValuePages

LEAST_KEYS = 256  # a shorter part of the keys is not worth its share of the merge
PROGRAMS = 2  # to each multiprocessor, at which the device counts as full
AT_ONCE = 16  # parts that are merged in one go
LOG2_E = 1.4426950408889634


@triton.jit
def _keys_of_tile(first, queries, parts, start, WINDOW: tl.constexpr):
    """Return the run of keys that any query of a tile sees; empty where it has no parts."""
    position = start + first
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)
    return begin, tl.where(parts > 0, position + queries, begin)


@triton.jit
def _attend_block(
    key,
    end,
    position,
    q,
    k_pages,
    v_pages,
    table,
    kv_head,
    peak,
    total,
    out,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take in the keys from `key` on, none of `end` or after. Scores are in units of log 2."""
    keys = key + tl.arange(0, BLOCK_KEYS)
    here = keys < end
    width = tl.arange(0, BLOCK_HEAD)
    page = tl.load(table + keys // PAGE, mask=here, other=0).to(tl.int64)
    place = ((page * KV_HEADS + kv_head) * PAGE + keys % PAGE) * HEAD
    within = here[:, None] & (width < HEAD)[None, :]
    k = tl.load(k_pages + place[:, None] + width[None, :], mask=within, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    # With a cap, softcap * tanh(score / softcap), by way of exp2.
    score = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(score * scale))) if CAPPED else score * scale
    if MASKED:
        seen = here[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # rows that have seen nothing yet
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    v = tl.load(v_pages + place[:, None] + width[None, :], mask=within, other=0.0)
    out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weight, 1), out


@triton.jit(do_not_specialize=["table_span"])
def attend(
    q,
    k_pages,
    v_pages,
    out,
    partial,
    mass,
    tiles,
    starts,
    table,
    q_token,
    table_span,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one tile's queries to one part of their keys.

    q, out          [T, H, D]; tokens of q stand q_token apart
    partial, mass   [parts, K, BLOCK_ROWS, D] and [parts, K, BLOCK_ROWS] float32, where SPLIT: what each part gives by
                    itself, and the logarithm of its softmax's denominator
    tiles           [parts, 6] int32: a `Part` each
    scale           of scores; with a cap, 2 * scale / softcap. Both, and softcap, in units of log 2
    """
    part_index = tl.program_id(0)
    kv_head = tl.program_id(1)
    tiles += part_index * 6
    span = tl.load(tiles)
    token = tl.load(tiles + 1)
    first = tl.load(tiles + 2)
    queries = tl.load(tiles + 3)
    part = tl.load(tiles + 4)
    parts = tl.load(tiles + 5)
    start = tl.load(starts + span)
    table += span.to(tl.int64) * table_span

    row = tl.arange(0, BLOCK_ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    width = tl.arange(0, BLOCK_HEAD)
    inside = query < queries
    within = inside[:, None] & (width < HEAD)[None, :]
    at = (token + query).to(tl.int64)
    q_rows = tl.load(q + (at * q_token + head * HEAD)[:, None] + width[None, :], mask=within, other=0.0)
    position = start + first + query

    begin, end = _keys_of_tile(first, queries, parts, start, WINDOW)
    if SPLIT:
        share = tl.cdiv(end - begin, tl.maximum(parts, 1))
        begin += part * share
        end = tl.minimum(end, begin + share)
    clear = begin  # where a mask is needed from: up to here every query sees every key
    if WINDOW == 0:
        clear += tl.maximum(tl.minimum(end, start + first + 1) - begin, 0) // BLOCK_KEYS * BLOCK_KEYS

    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    result = tl.zeros([BLOCK_ROWS, BLOCK_HEAD], tl.float32)
    if WINDOW == 0:
        for key in range(begin, clear, BLOCK_KEYS):
            peak, total, result = _attend_block(
                key, end, position, q_rows, k_pages, v_pages, table, kv_head, peak, total, result, scale, softcap,
                KV_HEADS, PAGE, HEAD, WINDOW, CAPPED, False, BLOCK_KEYS, BLOCK_HEAD, PRECISION,
            )  # fmt: skip
    for key in range(clear, end, BLOCK_KEYS):
        peak, total, result = _attend_block(
            key, end, position, q_rows, k_pages, v_pages, table, kv_head, peak, total, result, scale, softcap,
            KV_HEADS, PAGE, HEAD, WINDOW, CAPPED, True, BLOCK_KEYS, BLOCK_HEAD, PRECISION,
        )  # fmt: skip

    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        at = (part_index.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_ROWS + row
        tl.store(partial + at[:, None] * HEAD + width[None, :], result, mask=within)
        logarithm = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(mass + at, tl.where(total == 0.0, float("-inf"), logarithm))
    else:
        place = (at * (KV_HEADS * GROUP) + head) * HEAD
        tl.store(out + place[:, None] + width[None, :], result.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["firsts"])
def merge(
    partial,
    mass,
    out,
    tiles,
    firsts,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """Put together one row of one tile. firsts [tiles] int32: where in `tiles` the first part of each stands."""
    head = tl.program_id(1)
    query = tl.program_id(2)
    first = tl.load(firsts + tl.program_id(0))
    token = tl.load(tiles + first * 6 + 1)
    queries = tl.load(tiles + first * 6 + 3)
    parts = tl.load(tiles + first * 6 + 5)
    if query < queries:
        width = tl.arange(0, BLOCK_HEAD)
        row = query * GROUP + head % GROUP
        peak = -float("inf")
        total = 0.0
        result = tl.zeros([BLOCK_HEAD], tl.float32)
        for base in range(0, parts, BLOCK_PARTS):
            part = base + tl.arange(0, BLOCK_PARTS)
            here = part < parts
            at = ((first + part).to(tl.int64) * KV_HEADS + head // GROUP) * BLOCK_ROWS + row
            logarithm = tl.load(mass + at, mask=here, other=float("-inf"))
            within = here[:, None] & (width < HEAD)[None, :]
            given = tl.load(partial + at[:, None] * HEAD + width[None, :], mask=within, other=0.0)
            higher = tl.maximum(peak, tl.max(logarithm, 0))
            unseen = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(logarithm - unseen)
            shrink = tl.exp2(peak - unseen)
            result = result * shrink + tl.sum(given * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            peak = higher
        result = result / tl.where(total == 0.0, 1.0, total)
        place = ((token + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD
        tl.store(out + place + width, result.to(out.dtype.element_ty), mask=width < HEAD)


@triton.jit
def write(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the keys and values of one token where its slot says."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < KV_HEADS * HEAD
    head = at // HEAD
    width = at % HEAD
    place = ((slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE) * HEAD + width
    tl.store(k_pages + place, tl.load(k + token * k_token + head * k_head + width, mask=inside), mask=inside)
    tl.store(v_pages + place, tl.load(v + token * v_token + head * v_head + width, mask=inside), mask=inside)


class Part(NamedTuple):
    """One part of a tile's keys: a row of `tiles`.

    span         whose keys; for padding any, since it has no parts
    token        the tile's first query, in the step
    first        the same, in the span
    queries      how many
    part, parts  which of how many
    """

    span: int
    token: int
    first: int
    queries: int
    part: int
    parts: int


class Blocks(NamedTuple):
    """How much of a tile is in hand at once."""

    rows: int
    keys: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """What tiles are cut by: the heads of keys, how many heads of queries share each, and the size of a head."""

    kv_heads: int
    shared: int
    head: int
    dtype: torch.dtype

    @property
    def block_head(self) -> int:
        return max(16, triton.next_power_of_2(self.head))  # matrix products want 16 at least

    def short(self) -> Blocks:
        """Return the blocks of tiles for few queries: all that is read is keys, so these are many."""
        rows = max(16, triton.next_power_of_2(self.shared))
        if self.dtype is torch.float32:
            return Blocks(rows, 32, 8, 2)
        if self.block_head > 128:
            return Blocks(rows, 32, 4, 2)
        return Blocks(rows, 64, 4, 3)

    def long(self) -> Blocks:
        """Return the blocks of tiles for many queries."""
        if self.dtype is torch.float32:
            return self.short()  # exact products need many registers
        least = triton.next_power_of_2(self.shared)
        if self.block_head > 128:
            return Blocks(max(64, least), 32, 8, 2)
        return Blocks(max(128, least), 64, 8, 3)


class PagedAttention:
    """The attention family."""

    def __init__(self, room: int | None = None) -> None:
        """Count as `room` how many parts the device computes side by side; without it, the device is asked."""
        self._room = room

    def prepare(self, batch: AttentionBatch) -> Plan:
        return Plan(batch, self._room or self._ask(batch.table.device))

    def _ask(self, device: torch.device) -> int:
        self._room = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
        return self._room


class Cut(NamedTuple):
    """The tiles of one size.

    tiles   [parts, 6] int32, as `attend` reads them
    firsts  [tiles] int32, as `merge` reads them; None where no tile has several parts
    most    queries in a tile
    """

    blocks: Blocks
    tiles: Tensor
    firsts: Tensor | None
    most: int


class Plan:
    """One step of one page group. Tiles are cut at the first layer, which knows the heads, and kept for the others."""

    def __init__(self, batch: AttentionBatch, room: int) -> None:
        self._batch = batch
        self._room = room
        self._cuts: dict[Shape, list[Cut]] = {}

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        tokens, heads, size = k.shape
        assert k.stride(2) == v.stride(2) == 1
        block = min(triton.next_power_of_2(heads * size), 2048)
        write[tokens, triton.cdiv(heads * size, block)](
            k,
            v,
            pages.k,
            pages.v,
            self._batch.slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            KV_HEADS=heads,
            PAGE=self._batch.page_tokens,
            HEAD=size,
            BLOCK=block,
        )

    def run(self, q: Tensor, pages: KeyValuePages, *, scale: float, softcap: float | None = None) -> Tensor:
        tokens, heads, size = q.shape
        kv_heads = pages.k.shape[1]
        q = q if q.stride()[1:] == (size, 1) else q.contiguous()
        out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
        shape = Shape(kv_heads, heads // kv_heads, size, q.dtype)
        cuts = self._cuts.get(shape)
        if cuts is None:
            cuts = self._cuts[shape] = list(cut(self._batch, shape, self._room))
        for each in cuts:
            self._run(each, shape, q, pages, out, scale, softcap)
        return out

    def _run(
        self, cut: Cut, shape: Shape, q: Tensor, pages: KeyValuePages, out: Tensor, scale: float, softcap: float | None
    ) -> None:
        blocks, parts, split = cut.blocks, len(cut.tiles), cut.firsts is not None
        partial = mass = out  # without parts, not looked at
        if split:
            partial = out.new_empty((parts, shape.kv_heads, blocks.rows, shape.head), dtype=torch.float32)
            mass = out.new_empty((parts, shape.kv_heads, blocks.rows), dtype=torch.float32)
        batch = self._batch
        attend[parts, shape.kv_heads](
            q,
            pages.k,
            pages.v,
            out,
            partial,
            mass,
            cut.tiles,
            batch.start,
            batch.table,
            q.stride(0),
            batch.table.stride(0),
            LOG2_E * (scale if softcap is None else 2 * scale / softcap),
            0.0 if softcap is None else LOG2_E * softcap,
            KV_HEADS=shape.kv_heads,
            GROUP=shape.shared,
            PAGE=batch.page_tokens,
            HEAD=shape.head,
            WINDOW=batch.window or 0,
            CAPPED=softcap is not None,
            SPLIT=split,
            BLOCK_ROWS=blocks.rows,
            BLOCK_KEYS=blocks.keys,
            BLOCK_HEAD=shape.block_head,
            PRECISION="ieee",
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if cut.firsts is not None:
            merge[len(cut.firsts), shape.kv_heads * shape.shared, cut.most](
                partial,
                mass,
                out,
                cut.tiles,
                cut.firsts,
                KV_HEADS=shape.kv_heads,
                GROUP=shape.shared,
                HEAD=shape.head,
                BLOCK_ROWS=blocks.rows,
                BLOCK_PARTS=AT_ONCE,
                BLOCK_HEAD=shape.block_head,
                num_warps=2,
            )


def cut(batch: AttentionBatch, shape: Shape, room: int) -> Iterable[Cut]:
    """Cut a step into tiles, small ones for spans of few queries and large ones for the others."""
    short, long = shape.short(), shape.long()
    few = short.rows // shape.shared
    spans = range(len(batch.counts))
    padding = len(batch.slots) - batch.offsets[-1]
    yield from _cut(batch, shape, short, [span for span in spans if batch.counts[span] <= few], padding, room)
    yield from _cut(batch, shape, long, [span for span in spans if batch.counts[span] > few], 0, room)


def _cut(
    batch: AttentionBatch, shape: Shape, blocks: Blocks, spans: list[int], padding: int, room: int
) -> Iterable[Cut]:
    most = blocks.rows // shape.shared
    whole = [
        (span, batch.offsets[span] + first, first, min(most, batch.counts[span] - first))
        for span in spans
        for first in range(0, batch.counts[span], most)
    ]
    keys = [_bound(batch, span, first, queries) for span, _, first, queries in whole]
    share = max(LEAST_KEYS, -(-sum(keys) * shape.kv_heads // room))
    parts = [-(-count // share) for count in keys]
    end = batch.offsets[-1]
    whole += [(0, end + first, 0, min(most, padding - first)) for first in range(0, padding, most)]
    parts += [0] * (len(whole) - len(parts))
    if not whole:
        return
    rows = [Part(*tile, part, count) for tile, count in zip(whole, parts, strict=True) for part in range(max(1, count))]
    firsts: list[int] = []
    if max(parts) > 1:
        firsts = np.cumsum([0, *(max(1, count) for count in parts[:-1])]).tolist()
    sent = torch.from_numpy(np.array([*np.array(rows).ravel(), *firsts], dtype=np.int32))
    sent = sent.to(batch.table.device, non_blocking=True)
    tiles, rest = sent[: 6 * len(rows)].view(-1, 6), sent[6 * len(rows) :]
    yield Cut(blocks, tiles, rest if len(rest) else None, max(tile[3] for tile in whole))


def _bound(batch: AttentionBatch, span: int, first: int, queries: int) -> int:
    """Bound how many keys the queries of a tile see."""
    every = batch.starts[span] + first + queries
    return every if batch.window is None else min(every, batch.window + queries - 1)
