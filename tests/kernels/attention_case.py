"""An attention step assembled by hand, and its result by a naive loop in float64."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace

from infd.kernels.cpu import attention as native
from infd.kernels.cpu.library import Library, NativeMissing
from infd.kernels.families.attention import KeyValuePages
from infd.kernels.reference import int8
from tests.kernels.paging import PagedSpan, attention_batch

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import Attention

KV_HEADS = 2


def implementation(request: pytest.FixtureRequest, reference: type[Attention]) -> Attention:
    """Return the reference, or the native class of its name for the instruction set in request.param."""
    if request.param == "reference":
        return reference()
    request.getfixturevalue("built")
    try:
        return getattr(native, reference.__name__)(Library(request.param))
    except NativeMissing as missing:
        pytest.skip(str(missing))


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend q [Q, H, D], at positions from `start` on, to a sequence's k and v [L, K, D], head by head in float64."""
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
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: position + 1 - first]
            out[i, head] = weights @ v[first : position + 1, head // shared].double()
    return out


def narrow(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return x [..., K, D] as stored in a cache of `dtype`."""
    if scale is None:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale[:, None]).clamp(-limit, limit).to(dtype)


def bits(x: Tensor) -> Tensor:
    """Return x as a dtype that torch can index and compare; it can do neither with 8-bit floats."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


class Case:
    """Sequences in scattered pages of a cache filled with NaN; the step's own keys and values are not yet written."""

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
        held: torch.dtype | None = None,
        sinks: bool = False,
        quantized: bool = False,
        seed: int = 0,
    ) -> None:
        """Assemble the case.

        held       dtype of a cache with one scale for each head; None: the queries' dtype, unscaled
        quantized  use an int8 cache, with keys and values that int8 represents exactly
        """
        generator = torch.Generator().manual_seed(seed)
        shuffle = random.Random(seed)
        self.lengths, self.window, self.softcap = lengths, window, softcap
        self.scale = 1.2 * head**-0.5
        needed = [-(-(start + count) // page_tokens) for start, count in lengths]
        ids = list(range(1, sum(needed) + 3))
        shuffle.shuffle(ids)
        row, kept = (int8.row_bytes(head), torch.int8) if quantized else (head, held or dtype)
        blank = torch.empty((len(ids) + 1, KV_HEADS, page_tokens, row), dtype=kept)
        blank.view(torch.uint8).fill_(255)  # NaN, as a number or as a scale
        self.scales = None if held is None else torch.tensor([[0.02, 0.5], [0.03, 0.01]])
        self.pages = KeyValuePages(blank, blank.clone(), self.scales)
        self.sinks = 2 * torch.randn(KV_HEADS * shared, generator=generator) if sinks else None
        self.spans, self.kv = [], []
        for (start, count), pages in zip(lengths, needed, strict=True):
            table = [ids.pop() for _ in range(pages)]
            k, v = (torch.randn(start + count, KV_HEADS, head, generator=generator).to(dtype) for _ in range(2))
            if quantized:
                k, v = (int8.unpack(int8.pack(x), head, dtype) for x in (k, v))
            dropped = 0 if window is None else max(0, start - window + 1) // page_tokens
            for at in range(dropped * page_tokens, start):
                place = (table[at // page_tokens], slice(None), at % page_tokens)
                for cache, new, scale in zip(self.pages[:2], (k, v), self._by_head(), strict=True):
                    kept = int8.pack(new[at]) if quantized else narrow(new[at], cache.dtype, scale)
                    bits(cache)[place] = bits(kept)
            self.spans.append(PagedSpan(start, count, [0] * dropped + table[dropped:]))
            self.kv.append((k, v))
        tokens = sum(count for _, count in lengths) + padding
        self.q = torch.randn(tokens, KV_HEADS * shared, head, generator=generator).to(dtype)
        self.batch = attention_batch(self.spans, page_tokens=page_tokens, window=window, padding=padding, slack=slack)
        self.padding = torch.randn(padding, KV_HEADS, head, generator=generator).to(dtype)

    def _by_head(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.scales is None else (self.scales[0], self.scales[1])

    def move(self, device: torch.device) -> None:
        """Move the inputs to a device. Call `expected` before: it computes on the CPU."""
        self.pages = KeyValuePages(*(tensor if tensor is None else tensor.to(device) for tensor in self.pages))
        self.q, self.padding = self.q.to(device), self.padding.to(device)
        self.sinks = None if self.sinks is None else self.sinks.to(device)
        self.kv = [(k.to(device), v.to(device)) for k, v in self.kv]
        batch = self.batch
        self.batch = replace(
            batch, start=batch.start.to(device), table=batch.table.to(device), slots=batch.slots.to(device)
        )

    def compute(self, attention: Attention) -> Tensor:
        plan = attention.prepare(self.batch)
        k, v = (
            torch.cat([*(kv[at][start:] for kv, (start, _) in zip(self.kv, self.lengths, strict=True)), self.padding])
            for at in range(2)
        )
        plan.write(k, v, self.pages)
        return plan.run(self.q, self.pages, scale=self.scale, softcap=self.softcap, sinks=self.sinks)

    def expected(self) -> Tensor:
        parts, offset = [], 0
        for (k, v), (start, count) in zip(self.kv, self.lengths, strict=True):
            q = self.q[offset : offset + count]
            read = [
                new if scale is None else narrow(new, cache.dtype, scale).double() * scale[:, None]
                for new, cache, scale in zip((k, v), self.pages[:2], self._by_head(), strict=True)
            ]
            limits = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
            parts.append(naive(q, *read, start, scale=self.scale, **limits))
            offset += count
        return torch.cat(parts)

    def error(self, attention: Attention) -> float:
        out, expected = self.compute(attention), self.expected()
        assert out.isfinite().all()
        return float((out[: len(expected)].double() - expected).abs().max())
