"""A step of attention, put together by hand, and what a loop that anyone can check by eye says of it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from infd.kernels.ops import KeyValuePages
from tests.kernels.paging import PagedSpan, attention_batch

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.ops import Attention

KV_HEADS = 2


def naive(
    q: Tensor, k: Tensor, v: Tensor, start: int, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend q [Q, H, D], at positions from `start`, to one sequence's k and v [L, K, D], head by head, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    shared = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // shared].double()
            scores = keys @ q[i, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.softmax(0)
            out[i, head] = weights @ v[first : position + 1, head // shared].double()
    return out


class Case:
    """Sequences in scattered pages of a cache full of NaN, the tokens of this step not yet written."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        shared: int = 2,
        head: int = 8,
        page_tokens: int = 4,
        window: int | None = None,
        softcap: float | None = None,
        padding: int = 0,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shuffle = random.Random(seed)
        self.lengths, self.window, self.softcap = lengths, window, softcap
        self.scale = 1.2 * head**-0.5
        needed = [-(-(start + count) // page_tokens) for start, count in lengths]
        ids = list(range(1, sum(needed) + 3))
        shuffle.shuffle(ids)
        shape = (len(ids) + 1, KV_HEADS, page_tokens, head)
        self.pages = KeyValuePages(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        self.spans, self.kv = [], []
        for (start, count), pages in zip(lengths, needed, strict=True):
            table = [ids.pop() for _ in range(pages)]
            k, v = (torch.randn(start + count, KV_HEADS, head, generator=generator).to(dtype) for _ in range(2))
            dropped = 0 if window is None else max(0, start - window + 1) // page_tokens
            for at in range(dropped * page_tokens, start):
                self.pages.k[table[at // page_tokens], :, at % page_tokens] = k[at]
                self.pages.v[table[at // page_tokens], :, at % page_tokens] = v[at]
            self.spans.append(PagedSpan(start, count, [0] * dropped + table[dropped:]))
            self.kv.append((k, v))
        tokens = sum(count for _, count in lengths) + padding
        self.q = torch.randn(tokens, KV_HEADS * shared, head, generator=generator).to(dtype)
        self.batch = attention_batch(self.spans, page_tokens=page_tokens, window=window, padding=padding, slack=slack)
        self.padding = torch.randn(padding, KV_HEADS, head, generator=generator).to(dtype)

    def compute(self, attention: Attention) -> Tensor:
        plan = attention.prepare(self.batch)
        k, v = (
            torch.cat([*(kv[at][start:] for kv, (start, _) in zip(self.kv, self.lengths, strict=True)), self.padding])
            for at in range(2)
        )
        plan.write(k, v, self.pages)
        return plan.run(self.q, self.pages, scale=self.scale, softcap=self.softcap)

    def expected(self) -> Tensor:
        parts, offset = [], 0
        for (k, v), (start, count) in zip(self.kv, self.lengths, strict=True):
            q = self.q[offset : offset + count]
            parts.append(naive(q, k, v, start, scale=self.scale, window=self.window, softcap=self.softcap))
            offset += count
        return torch.cat(parts)

    def error(self, attention: Attention) -> float:
        out, expected = self.compute(attention), self.expected()
        assert out.isfinite().all()
        return float((out[: len(expected)].double() - expected).abs().max())
