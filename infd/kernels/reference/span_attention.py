"""Attention without a cache in plain torch, span by span."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from infd.kernels.families.span_attention import WHOLE

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.span_attention import Reach, SpanBatch

QUERY_BLOCK = 256  # bounds the size of masks and biases


class SpanAttention:
    """Implements families.span_attention.SpanAttention."""

    def prepare(self, batch: SpanBatch) -> Plan:
        return Plan(batch)


class Plan:
    """Implements families.span_attention.SpanPlan."""

    def __init__(self, batch: SpanBatch) -> None:
        self._spans = [span for span in zip(batch.offsets, batch.offsets[1:], strict=False) if span[0] < span[1]]
        self._queries: Tensor | None = None
        if batch.queries is not None:
            self._queries = torch.tensor(batch.queries, dtype=torch.int64).to(batch.device)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, reach: Reach = WHOLE, bias: Tensor | None = None
    ) -> Tensor:
        if self._queries is not None:  # among zeros: torch may round the same query differently alone
            q = q.new_zeros(len(k), *q.shape[1:]).index_copy_(0, self._queries, q)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        group = q.shape[1] // k.shape[1]
        whole = reach == WHOLE and bias is None
        for first, end in self._spans:
            block = end - first if whole else QUERY_BLOCK
            for begin in range(first, end, block):
                last = min(begin + block, end)
                start, stop = reach.keys(begin, first, end)[0], reach.keys(last - 1, first, end)[1]
                keys, values = (
                    x[start:stop].transpose(0, 1).repeat_interleave(group, 0)
                    if group > 1
                    else x[start:stop].transpose(0, 1)
                    for x in (k, v)
                )
                mask = None if whole else _mask(range(begin, last), range(start, stop), reach, bias, q)
                attended = F.scaled_dot_product_attention(
                    q[begin:last].transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale
                )
                out[begin:last] = attended[0].transpose(0, 1)
        return out if self._queries is None else out[self._queries]


def _mask(queries: range, keys: range, reach: Reach, bias: Tensor | None, q: Tensor) -> Tensor:
    """Return the terms added to the scores, [1 or H, queries, keys] in q's dtype: biases, and -inf for unseen keys."""
    query = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    distance = torch.arange(keys.start, keys.stop, device=q.device) - query
    if bias is None:
        mask = torch.zeros(1, *distance.shape, dtype=q.dtype, device=q.device)
    else:
        most = bias.shape[1] // 2
        mask = bias.to(q.dtype)[:, distance.clamp(-most, most) + most]
    unseen = torch.zeros_like(distance, dtype=torch.bool)
    if reach.before is not None:
        unseen |= distance < -reach.before
    if reach.after is not None:
        unseen |= distance > reach.after
    return mask.masked_fill_(unseen, -torch.inf)
