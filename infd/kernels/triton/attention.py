"""Paged attention on a GPU: one kernel for any mix of query lengths.

A program computes one split of a tile's keys (`tiles.py`), for all query heads of one key head: queries times heads are
the rows of one matrix product. A second kernel merges splits. The device computes each split's key range from the true
lengths. Arguments that change from step to step are excluded from Triton's specialization, to avoid recompiling.

Keys and values of an fp8 cache are converted to the queries' dtype. The cache has two scales for each key head: scores
are multiplied by the keys' scale, the result by the values' scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.families.attention import FLOAT8
from infd.kernels.triton.apportion import Apportioned
from infd.kernels.triton.pages import store
from infd.kernels.triton.tiles import Shape, TileTable, tile_step
from infd.kernels.triton.tilings import ATTENTION, tilings

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, KeyValuePages
    from infd.kernels.triton.blocks import Tiling
    from infd.kernels.triton.tilings import Tilings

MERGED = 16  # splits that `merge` loads at a time
LOG2_E = 1.4426950408889634


@triton.jit
def _keys_of_tile(first, queries, splits, start, WINDOW: tl.constexpr):
    """Return the range of keys to which the tile's queries attend; empty for padding, which has no splits."""
    position = start + first
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)
    return begin, tl.where(splits > 0, position + queries, begin)


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
    """Accumulate a block of keys, from `key` on and before `end`. Scores are multiplied by log2(e), for exp2."""
    keys = key + tl.arange(0, BLOCK_KEYS)
    inside = keys < end
    width = tl.arange(0, BLOCK_HEAD)
    page = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
    place = ((page * KV_HEADS + kv_head) * PAGE + keys % PAGE) * HEAD
    within = inside[:, None] & (width < HEAD)[None, :]
    k = tl.load(k_pages + place[:, None] + width[None, :], mask=within, other=0.0).to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    # softcap * tanh(score / softcap), by exp2.
    score = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(score * scale))) if CAPPED else score * scale
    if MASKED:
        seen = inside[None, :] & (keys[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: no key of the row was visible so far
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(peak - base)
    v = tl.load(v_pages + place[:, None] + width[None, :], mask=within, other=0.0).to(q.dtype)
    out = tl.dot(weight.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
    return higher, total * shrink + tl.sum(weight, 1), out


@triton.jit
def _sink(sinks, head, peak, total, out):
    """Accumulate the sink: a key with a score and no value. Scores are multiplied by log2(e), for exp2."""
    score = tl.load(sinks + head) * 1.4426950408889634
    higher = tl.maximum(peak, score)
    shrink = tl.exp2(peak - higher)
    return higher, total * shrink + tl.exp2(score - higher), out * shrink[:, None]


@triton.jit(do_not_specialize=["table_span"])
def attend(
    q,
    k_pages,
    v_pages,
    scales,
    sinks,
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
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one tile's queries to one split of their keys.

    q, out          [T, H, D]; q_token is the stride between tokens of q
    scales          [2, K], read if SCALED
    sinks           [H], read if SINKS and not SPLIT
    partial, mass   [splits, K, BLOCK_ROWS, D] and [splits, K, BLOCK_ROWS] float32, written if SPLIT: a split's result,
                    and the logarithm of its softmax denominator
    tiles           [splits, 6] int32: one `KeySplit` each
    scale           multiplies scores, log2(e) included; with a softcap 2 * scale / softcap * log2(e)
    softcap         softcap * log2(e)
    """
    split_index = tl.program_id(0)
    kv_head = tl.program_id(1)
    tiles += split_index * 6
    span = tl.load(tiles)
    token = tl.load(tiles + 1)
    first = tl.load(tiles + 2)
    queries = tl.load(tiles + 3)
    split = tl.load(tiles + 4)
    splits = tl.load(tiles + 5)
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
    if SCALED:
        scale *= tl.load(scales + kv_head)

    begin, end = _keys_of_tile(first, queries, splits, start, WINDOW)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, tl.maximum(splits, 1)), BLOCK_KEYS) * BLOCK_KEYS
        begin += split * share
        end = tl.minimum(end, begin + share)
    clear = begin  # keys before `clear` are visible to every query: no mask needed
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

    if SINKS and not SPLIT:
        peak, total, result = _sink(sinks, head, peak, total, result)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    if SCALED:
        result *= tl.load(scales + KV_HEADS + kv_head)
    if SPLIT:
        at = (split_index.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_ROWS + row
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
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """Merge the splits of one row of one tile. firsts [tiles] int32: each tile's first row in `tiles`."""
    head = tl.program_id(1)
    query = tl.program_id(2)
    first = tl.load(firsts + tl.program_id(0))
    token = tl.load(tiles + first * 6 + 1)
    queries = tl.load(tiles + first * 6 + 3)
    splits = tl.load(tiles + first * 6 + 5)
    if query < queries:
        width = tl.arange(0, BLOCK_HEAD)
        row = query * GROUP + head % GROUP
        peak = -float("inf")
        total = 0.0
        result = tl.zeros([BLOCK_HEAD], tl.float32)
        for base in range(0, splits, BLOCK_SPLITS):
            split = base + tl.arange(0, BLOCK_SPLITS)
            inside = split < splits
            at = ((first + split).to(tl.int64) * KV_HEADS + head // GROUP) * BLOCK_ROWS + row
            logarithm = tl.load(mass + at, mask=inside, other=float("-inf"))
            within = inside[:, None] & (width < HEAD)[None, :]
            split_result = tl.load(partial + at[:, None] * HEAD + width[None, :], mask=within, other=0.0)
            higher = tl.maximum(peak, tl.max(logarithm, 0))
            base_peak = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(logarithm - base_peak)
            shrink = tl.exp2(peak - base_peak)
            result = result * shrink + tl.sum(split_result * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            peak = higher
        if SINKS:
            score = tl.load(sinks + head) * 1.4426950408889634
            higher = tl.maximum(peak, score)
            shrink = tl.exp2(peak - higher)
            result *= shrink
            total = total * shrink + tl.exp2(score - higher)
        result = result / tl.where(total == 0.0, 1.0, total)
        place = ((token + query).to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD
        tl.store(out + place + width, result.to(out.dtype.element_ty), mask=width < HEAD)


class PagedAttention:
    """Implements families.attention.Attention."""

    def __init__(self, programs: int | None = None, tilings: Tilings[Shape, Tiling] | None = None) -> None:
        """Set up.

        programs  number of programs that the device runs in parallel; None: the tiling's
        tilings   None: the tilings for the first step's device
        """
        self._programs = programs
        self._tilings = tilings

    @property
    def shapes(self) -> list[Shape]:
        """Return the head shapes of all steps so far."""
        return [] if self._tilings is None else self._tilings.requested

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        return Plan(batch, self._tilings_of(batch.table.device), self._programs)

    def captured(self, batch: AttentionBatch) -> CapturedPlan:
        return CapturedPlan(batch, self._tilings_of(batch.table.device), self._programs)

    def _tilings_of(self, device: torch.device) -> Tilings[Shape, Tiling]:
        if self._tilings is None:
            self._tilings = tilings(ATTENTION, device)
        return self._tilings


class Float8PagedAttention(PagedAttention):
    """Implements families.attention.Attention over an fp8 cache."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, FLOAT8


class Plan:
    """The attention of one step over one page group. Layers of equal head shape share tiles."""

    def __init__(self, batch: AttentionBatch, tilings: Tilings[Shape, Tiling], programs: int | None) -> None:
        self._batch = batch
        self._tilings = tilings
        self._programs = programs
        self._tile_tables: dict[Shape, list[TileTable]] = {}

    @property
    def slots(self) -> Tensor:
        return self._batch.slots

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        store(k, v, pages, self._batch.slots)

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tokens, heads, size = q.shape
        kv_heads = pages.k.shape[1]
        q = q if q.stride()[1:] == (size, 1) else q.contiguous()
        out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
        shape = Shape(kv_heads, heads // kv_heads, size, q.dtype, pages.k.itemsize < q.itemsize)
        tables = self._tile_tables.get(shape)
        if tables is None:
            tables = self._tile_tables[shape] = self._tile(shape)
        for table in tables:
            self._run(table, shape, q, pages, out, scale, softcap, sinks)
        return out

    def _tile(self, shape: Shape) -> list[TileTable]:
        return list(tile_step(self._batch, shape, *self._tiling(shape)))

    def _tiling(self, shape: Shape) -> tuple[Tiling, int]:
        tiling = self._tilings[shape]
        return tiling, self._programs or tiling.programs * self._tilings.gpu.multiprocessors

    def _run(
        self,
        table: TileTable,
        shape: Shape,
        q: Tensor,
        pages: KeyValuePages,
        out: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        blocks, splits, merged = table.blocks, len(table.tiles), table.firsts is not None
        partial = mass = out  # placeholders: the kernel writes them only if splits are merged
        if merged:
            partial = out.new_empty((splits, shape.kv_heads, blocks.rows, shape.head), dtype=torch.float32)
            mass = out.new_empty((splits, shape.kv_heads, blocks.rows), dtype=torch.float32)
        batch = self._batch
        sinks_or_any = out if sinks is None else sinks
        attend[splits, shape.kv_heads](
            q,
            pages.k,
            pages.v,
            out if pages.scales is None else pages.scales,
            sinks_or_any,
            out,
            partial,
            mass,
            table.tiles,
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
            SCALED=pages.scales is not None,
            SINKS=sinks is not None,
            SPLIT=merged,
            BLOCK_ROWS=blocks.rows,
            BLOCK_KEYS=blocks.keys,
            BLOCK_HEAD=shape.block_head,
            PRECISION="ieee",
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if table.firsts is not None:
            merge[len(table.firsts), shape.kv_heads * shape.shared, table.most_queries](
                partial,
                mass,
                out,
                table.tiles,
                table.firsts,
                sinks_or_any,
                KV_HEADS=shape.kv_heads,
                GROUP=shape.shared,
                HEAD=shape.head,
                SINKS=sinks is not None,
                BLOCK_ROWS=blocks.rows,
                BLOCK_SPLITS=MERGED,
                BLOCK_HEAD=shape.block_head,
                num_warps=2,
            )


class CapturedPlan(Plan):
    """Captured steps of one batch size and page group. The device splits the keys once per step, in `begin`."""

    def __init__(self, batch: AttentionBatch, tilings: Tilings[Shape, Tiling], programs: int | None) -> None:
        super().__init__(batch, tilings, programs)
        self._apportioned: list[Apportioned] = []

    def refill(self, starts: list[int]) -> None:
        """No-op: the device reads the positions."""

    def begin(self) -> None:
        for each in self._apportioned:
            each.renew()

    def _tile(self, shape: Shape) -> list[TileTable]:
        apportioned = Apportioned(self._batch, shape, *self._tiling(shape))
        apportioned.renew()
        self._apportioned.append(apportioned)
        return [apportioned.tile_table]
