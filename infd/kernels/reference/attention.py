"""Paged attention in plain torch.

Pages are copied into one run of keys per sequence, then torch's fused attention
does the rest. Sequences that compute one token go together, in buckets of
similar length; longer spans go one by one, in blocks of queries.

Memory that no query of a span may see can hold anything, NaN included, and zero
times NaN is NaN: such rows are zeroed in the copy, keys and values both.

On a GPU, `prepare` waits for the device once per part, to learn which rows those are.

Letters: T, H, K, D as in `ops.py`; G = H / K query heads share a key-value head;
S spans of a bucket; Q queries of a span; N pages; L = N * page_tokens keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from infd.kernels.families.attention import FLOAT8
from infd.kernels.reference import int8

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, KeyValuePages

SHORT = 256  # keys; padding up to here costs less than one bucket more
BUCKET_CPU = 2048  # keys; copies of a few megabytes stay in the CPU's cache, and come from memory already mapped
BUCKET_GPU = 2**17
QUERY_BLOCK = 256  # bounds the mask, and lets early queries of a long span skip the keys of later ones


class PagedAttention:
    """The attention family."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, dtype

    def prepare(self, batch: AttentionBatch) -> Plan:
        single = [span for span, count in enumerate(batch.counts) if count == 1]
        longer = [span for span, count in enumerate(batch.counts) if count > 1]
        return Plan(
            [_single(batch, spans) for spans in _buckets(batch, single)] + [_long(batch, span) for span in longer],
            batch,
        )

    def lasting(self, _: AttentionBatch) -> None:
        """None: which keys are seen is looked up in `prepare`."""


class Float8PagedAttention(PagedAttention):
    """The same over a cache of 8-bit floats, each head of a layer divided by a number of its own."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return size, FLOAT8


class Int8PagedAttention(PagedAttention):
    """The same over a cache of int8: its rows become what they stand for as they are gathered."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return int8.row_bytes(size), torch.int8


class Plan:
    """One step of one page group."""

    def __init__(self, parts: list[_Singles | _Long], batch: AttentionBatch) -> None:
        self._parts = parts
        self.slots = batch.slots
        self._page = (batch.slots // batch.page_tokens)[:, None]
        self._offset = (batch.slots % batch.page_tokens)[:, None]

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        head = torch.arange(k.shape[1], device=k.device)
        for new, cache, scales in zip((k, v), pages[:2], _scales(pages), strict=True):
            _numbers(cache)[self._page, head, self._offset] = _numbers(_narrow(new, cache.dtype, scales))

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for part in self._parts:
            part.run(q, pages, out, _Scores(scale, softcap, sinks))
        return out


def _scales(pages: KeyValuePages) -> tuple[Tensor | None, Tensor | None]:
    """Return what keys and values of each head are multiplied with, [K] each."""
    return (None, None) if pages.scales is None else (pages.scales[0], pages.scales[1])


def _narrow(x: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Return x [T, K, D] as a cache of `dtype` holds it."""
    if dtype is torch.int8:
        return int8.pack(x)
    if scales is None:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scales[:, None]).clamp(-limit, limit).to(dtype)


def _widened(rows: Tensor, scales: Tensor | None, q: Tensor) -> Tensor:
    """Return what rows [S, K, L, row] of a cache stand for, [S, K, L, D], in q's type."""
    if rows.dtype is torch.int8:
        return int8.unpack(rows, q.shape[-1], q.dtype)
    return rows.to(q.dtype) if scales is None else (rows.to(q.dtype).float() * scales[:, None, None]).to(q.dtype)


def _numbers(x: Tensor) -> Tensor:
    """Return x as something that torch can index: 8-bit floats it cannot."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


class _Scores(NamedTuple):
    """What becomes of q·k before softmax."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [H]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend q [B, H, Q, D] to k and v, each [B, H or 1, L, D], where the mask `seen` [..., Q, L] is set.

        sinks  [..., Q], where there are any
        """
        if self.softcap is None and sinks is None:
            every = (-1, q.shape[1], -1, -1)  # where one head of keys serves all, a stride of 0: no copy
            return F.scaled_dot_product_attention(q, k.expand(every), v.expand(every), attn_mask=seen, scale=self.scale)
        # torch's fused attention has neither cap nor sinks. All queries of a head of keys stand as rows of one product.
        rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3).float()
        scores = (rows @ k.float().mT).view(*q.shape[:-1], -1)
        scores.mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores.masked_fill_(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().expand(q.shape[:-1])[..., None]), -1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return (weights.reshape(*rows.shape[:-1], -1) @ v.float()).view_as(q).to(q.dtype)


class _Keys(NamedTuple):
    """Which keys the spans of one part read.

    pages      [S, N]
    positions  [S, L] of each key in its sequence
    unseen     (span, key) of what no query may see
    """

    pages: Tensor
    positions: Tensor
    unseen: tuple[Tensor, Tensor]

    def gather(self, cache: Tensor, scales: Tensor | None, q: Tensor) -> Tensor:
        """Copy [P + 1, K, page_tokens, row], contiguous, to [S, K, L, D], zeros where no query may look."""
        _, heads, size, width = cache.shape
        rows = self.pages[:, None] * heads + torch.arange(heads, device=cache.device)[:, None]  # [S, K, N]
        # Whole rows by one index: several times faster than indexing by page and head.
        held = _numbers(cache).view(-1, size * width).index_select(0, rows.flatten()).view(cache.dtype)
        keys = _widened(held.view(*rows.shape[:2], -1, width), scales, q)
        span, key = self.unseen
        keys[span, :, key] = 0
        return keys


class _Singles:
    """Spans of one token each. The query heads of a group stand as rows, so a key is read once for all of them."""

    def __init__(self, tokens: Tensor, keys: _Keys, seen: Tensor) -> None:
        self._tokens = tokens  # [S]
        self._keys = keys
        self._seen = seen[:, None, None]  # [S, 1, 1, L]

    def run(self, q: Tensor, pages: KeyValuePages, out: Tensor, scores: _Scores) -> None:
        k, v = (self._keys.gather(*each, q) for each in zip(pages[:2], _scales(pages), strict=True))
        queries = q[self._tokens].unflatten(1, (k.shape[1], -1))  # [S, K, G, D]
        sinks = None if scores.sinks is None else scores.sinks.view(k.shape[1], -1)
        out[self._tokens] = scores.attend(queries, k, v, self._seen, sinks).flatten(1, 2)


class _Block(NamedTuple):
    """Some queries of a long span, and the run of keys that they can see at most."""

    queries: slice
    keys: slice
    seen: Tensor  # [Q, L]


class _Long:
    """One span of many tokens. Key-value heads stand as the batch and share their keys among the heads of a group."""

    def __init__(self, tokens: slice, keys: _Keys, blocks: list[_Block]) -> None:
        self._tokens = tokens
        self._keys = keys
        self._blocks = blocks

    def run(self, q: Tensor, pages: KeyValuePages, out: Tensor, scores: _Scores) -> None:
        k, v = (  # [K, 1, L, D]
            self._keys.gather(*each, q).transpose(0, 1) for each in zip(pages[:2], _scales(pages), strict=True)
        )
        grouped = (k.shape[0], -1)
        queries = q[self._tokens].unflatten(1, grouped).permute(1, 2, 0, 3)  # [K, G, Q, D]
        result = out[self._tokens].unflatten(1, grouped).permute(1, 2, 0, 3)
        sinks = None if scores.sinks is None else scores.sinks.view(k.shape[0], -1, 1)
        for block in self._blocks:
            result[:, :, block.queries] = scores.attend(
                queries[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys], block.seen, sinks
            )


def _buckets(batch: AttentionBatch, spans: list[int]) -> list[list[int]]:
    """Sort spans into buckets of bounded size, whose shortest needs more than half the pages of the longest."""
    most = (BUCKET_CPU if batch.table.device.type == "cpu" else BUCKET_GPU) // batch.page_tokens
    buckets: list[list[int]] = []
    longest = fewest = 0
    for pages, span in sorted(((_page_bound(batch, span), span) for span in spans), reverse=True):
        if not buckets or pages < fewest or (len(buckets[-1]) + 1) * longest > most:
            buckets.append([])
            longest = pages
            fewest = pages // 2 + 1 if pages * batch.page_tokens > SHORT else 0
        buckets[-1].append(span)
    return buckets


def _single(batch: AttentionBatch, spans: list[int]) -> _Singles:
    device = batch.table.device
    rows = torch.tensor(spans, device=device)
    tokens = torch.tensor([batch.offsets[span] for span in spans], device=device)
    start = batch.start[rows].long()[:, None]
    pages, positions = _key_run(batch, rows, max(_page_bound(batch, span) for span in spans))
    seen = _visible(start, positions, batch.window)
    return _Singles(tokens, _Keys(pages, positions, _where(~seen)), seen)


def _long(batch: AttentionBatch, span: int) -> _Long:
    count = batch.counts[span]
    rows = torch.tensor([span], device=batch.table.device)
    start = batch.start[rows].long()
    pages, positions = _key_run(batch, rows, _page_bound(batch, span))
    length = positions.shape[1]
    queries = start + torch.arange(count, device=start.device)  # [Q]
    ahead = length - count  # keys before the span's first query, at most

    blocks = []
    for first in range(0, count, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, count)
        # Bounds by the host's lengths. The truth may start earlier, which the mask settles.
        keys = slice(0 if batch.window is None else max(0, first - batch.window + 1), min(length, ahead + last))
        seen = _visible(queries[first:last, None], positions[0, keys], batch.window)
        blocks.append(_Block(slice(first, last), keys, seen))

    used = positions <= queries[-1]
    if batch.window is not None:
        used &= positions > start[:, None] - batch.window
    offset = batch.offsets[span]
    return _Long(slice(offset, offset + count), _Keys(pages, positions, _where(~used)), blocks)


def _page_bound(batch: AttentionBatch, span: int) -> int:
    """Bound how many pages the span's queries see."""
    every = -(-(batch.starts[span] + batch.counts[span]) // batch.page_tokens)
    if batch.window is None:
        return every
    # The keys seen need not begin with a page.
    return min(every, -(-(batch.window + batch.counts[span] - 1) // batch.page_tokens) + 1)


def _key_run(batch: AttentionBatch, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` page ids from the first that the spans see, [S, N], and the positions of their keys, [S, L]."""
    size, width = batch.page_tokens, batch.table.shape[1]
    first = torch.zeros_like(rows)
    if batch.window is not None:
        first = (batch.start[rows].long() - batch.window + 1).clamp(min=0) // size
    index = first[:, None] + torch.arange(count, device=rows.device)  # [S, N]
    pages = batch.table[rows].long().gather(1, index.clamp(max=width - 1))
    positions = index[:, :, None] * size + torch.arange(size, device=rows.device)
    return pages, positions.flatten(1)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Compare positions: a query sees itself and what is before it, as far as the window reaches."""
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return seen


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates at which a mask [S, L] is set."""
    span, key = mask.nonzero().unbind(1)
    return span, key
