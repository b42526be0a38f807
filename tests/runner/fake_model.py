"""A model whose next token betrays any mistake in tokens, positions, pages, slots or order.

Its keys are the tokens themselves. Attention returns, for each query, a weighted
sum of the whole history it reads back from the paged cache; the logits peak at a
token derived from that sum. `continuation` computes the same without any pages.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from infd.kernels.families.matrices import LEAST_ROWS
from infd.models.base import Batch, PageTensor
from infd.scheduler.layout import CacheLayout, PageGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, KeyValuePages
    from infd.models.base import PassAdapters
    from infd.models.parameter import Target

VOCAB = 101


class HistoryAttention:
    """Sums key * (position + 1) over a query's visible tokens, read page by page."""

    def prepare(self, batch: AttentionBatch) -> HistoryPlan:
        return HistoryPlan(batch)

    def captured(self, _: AttentionBatch) -> None:
        """None: it looks at lengths."""


class HistoryPlan:
    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self.slots = batch.slots

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        size = self.batch.page_tokens
        for kept, new in ((pages.k, k), (pages.v, v)):
            kept[self.batch.slots // size, :, self.batch.slots % size] = new

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.zeros_like(q)
        b = self.batch
        for i, offset in enumerate(b.offsets[:-1]):
            for j in range(b.counts[i]):
                position = int(b.start[i]) + j
                first = 0 if b.window is None else max(0, position - b.window + 1)
                for p in range(first, position + 1):
                    page = int(b.table[i, p // b.page_tokens])
                    out[offset + j] += pages.k[page, :, p % b.page_tokens] * (p + 1)
        return out


class FakeModel:
    """Two layers, in one group or in two.

    fault   called with each batch before it is computed
    """

    vocab_size = VOCAB
    least_rows = LEAST_ROWS
    generates = True
    experts = None
    skips_unsampled = True
    logits_dtype = torch.float32
    parameters: Sequence[object] = ()
    unread: frozenset[str] = frozenset()
    targets: Sequence[Target] = ()
    cache_scales: Mapping[int, object] = MappingProxyType({})

    def __init__(self, *, window: int | None = None, fault: Callable[[Batch], None] | None = None) -> None:
        self.window = window
        self.fault = fault
        self.batches = 0

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        if self.window is None:
            return CacheLayout((PageGroup(layers=(0, 1), page_tokens=page_tokens),))
        full = PageGroup(layers=(1,), page_tokens=page_tokens)
        return CacheLayout((full, PageGroup(layers=(0,), page_tokens=page_tokens, window=self.window)))

    def page_tensors(self, page_tokens: int) -> Sequence[PageTensor]:
        return [PageTensor(name, (1, page_tokens, 1), torch.float32) for name in ("k", "v")]

    def forward(self, batch: Batch) -> Tensor:
        if self.fault is not None:
            self.fault(batch)
        self.batches += 1
        by_layer = {layer: i for i, group in enumerate(self.cache_layout(1).groups) for layer in group.layers}
        hidden = batch.positions.float()
        for layer in range(2):
            kv = (batch.tokens.float() + layer)[:, None, None]
            plan = batch.attention[by_layer[layer]]
            plan.write(kv, kv, batch.cache[layer])
            if layer == 1 and batch.sampled is not None:
                hidden, plan = hidden[batch.sampled.tokens], batch.sampled.attention
            hidden = hidden + plan.run(torch.zeros(len(hidden), 1, 1), batch.cache[layer], scale=1.0)[:, 0, 0]
        return hidden[:, None]

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        return peak(hidden[:, 0])

    def fused(self, memory: object, buffers: object) -> None:
        return None

    def embedder(self, reduction: object, most: int) -> None:
        return None


def peak(total: Tensor) -> Tensor:
    """Return logits [N, VOCAB] whose largest is at a token derived from total [N], spread by 0.1 around it."""
    best = (total.long() * 7 + 3) % VOCAB
    return -((torch.arange(VOCAB) - best[:, None]) % VOCAB).float() * 0.1


def continuation(prompt: list[int], count: int, *, window: int | None = None) -> list[int]:
    """Return the first `count` greedy tokens that the fake model generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        last = len(tokens) - 1
        total = last + sum(
            (token + layer) * (p + 1)
            for layer in range(2)
            for p, token in enumerate(tokens)
            if window is None or layer == 1 or p > last - window
        )
        tokens.append((total * 7 + 3) % VOCAB)
    return tokens[len(prompt) :]
