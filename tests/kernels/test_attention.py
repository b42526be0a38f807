"""The reference attention against a loop that anyone can check by eye."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.kernels.ops import KeyValuePages
from infd.kernels.reference.attention import PagedAttention
from tests.kernels.paging import PagedSpan, attention_batch

if TYPE_CHECKING:
    from torch import Tensor

KV_HEADS, HEAD = 2, 8
SCALE = 0.4


def naive(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None, softcap: float | None) -> Tensor:
    """Attend q [Q, H, D], at positions from `start`, to one sequence's k and v [L, K, D], head by head, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    shared = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // shared].double()
            scores = keys @ q[i, head].double() * SCALE
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
        needed = [-(-(start + count) // page_tokens) for start, count in lengths]
        ids = list(range(1, sum(needed) + 3))
        shuffle.shuffle(ids)
        shape = (len(ids) + 1, KV_HEADS, page_tokens, HEAD)
        self.pages = KeyValuePages(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        self.spans, self.kv = [], []
        for (start, count), pages in zip(lengths, needed, strict=True):
            table = [ids.pop() for _ in range(pages)]
            k, v = (torch.randn(start + count, KV_HEADS, HEAD, generator=generator).to(dtype) for _ in range(2))
            dropped = 0 if window is None else max(0, start - window + 1) // page_tokens
            for at in range(dropped * page_tokens, start):
                self.pages.k[table[at // page_tokens], :, at % page_tokens] = k[at]
                self.pages.v[table[at // page_tokens], :, at % page_tokens] = v[at]
            self.spans.append(PagedSpan(start, count, [0] * dropped + table[dropped:]))
            self.kv.append((k, v))
        tokens = sum(count for _, count in lengths) + padding
        self.q = torch.randn(tokens, KV_HEADS * shared, HEAD, generator=generator).to(dtype)
        self.batch = attention_batch(self.spans, page_tokens=page_tokens, window=window, padding=padding, slack=slack)
        self.padding = torch.randn(padding, KV_HEADS, HEAD, generator=generator).to(dtype)

    def compute(self) -> Tensor:
        plan = PagedAttention().prepare(self.batch)
        k, v = (
            torch.cat([*(kv[at][start:] for kv, (start, _) in zip(self.kv, self.lengths, strict=True)), self.padding])
            for at in range(2)
        )
        plan.write(k, v, self.pages)
        return plan.run(self.q, self.pages, scale=SCALE, softcap=self.softcap)

    def expected(self) -> Tensor:
        parts, offset = [], 0
        for (k, v), (start, count) in zip(self.kv, self.lengths, strict=True):
            parts.append(naive(self.q[offset : offset + count], k, v, start, self.window, self.softcap))
            offset += count
        return torch.cat(parts)

    def error(self) -> float:
        out, expected = self.compute(), self.expected()
        assert out.isfinite().all()
        return float((out[: len(expected)].double() - expected).abs().max())


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3) | st.integers(1, 9)), min_size=1, max_size=6),
    shared=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
    padding=st.integers(0, 3),
    slack=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_any_mix_of_spans_gives_what_the_naive_loop_gives(lengths, **case):
    assert Case(lengths, **case).error() < 1e-5


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_span_longer_than_a_block_of_queries_is_exact_in_every_block(window, softcap):
    assert Case([(37, 530)], window=window, softcap=softcap, shared=2, page_tokens=16).error() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision_accumulates_in_float32(dtype, softcap):
    # 600 keys summed in bfloat16 would be off by far more than one rounding of the result.
    case = Case([(600, 1), (590, 2)], dtype=dtype, softcap=softcap)
    assert case.error() < 0.01


def test_one_long_sequence_does_not_pad_the_short_ones():
    case = Case([(400, 1), (3, 1), (50, 1), (390, 1)])
    widths = sorted(part._keys.positions.shape for part in PagedAttention().prepare(case.batch)._parts)
    assert widths == [(2, 52), (2, 404)]


def test_a_window_reads_only_the_pages_it_reaches():
    case = Case([(400, 1)], window=8)
    (part,) = PagedAttention().prepare(case.batch)._parts
    assert part._keys.pages.shape == (1, 3)
    assert case.error() < 1e-5


def test_many_sequences_are_cut_into_buckets_that_stay_in_the_cache():
    case = Case([(299, 1)] * 20)
    assert [len(part._keys.pages) for part in PagedAttention().prepare(case.batch)._parts] == [6, 6, 6, 2]
    assert case.error() < 1e-5


def test_padding_writes_to_the_scratch_page_only():
    case = Case([(3, 1)], padding=3)
    used = {page for span in case.spans for page in span.table}
    case.compute()
    untouched = [page for page in range(1, len(case.pages.k)) if page not in used]
    assert untouched
    assert case.pages.k[untouched].isnan().all()


def test_nan_in_a_key_that_is_seen_shows():
    case = Case([(6, 1), (2, 1)])
    case.pages.k[case.spans[0].table[0]] = torch.nan
    finite = case.compute().isfinite().flatten(1).all(1)
    assert finite.tolist() == [False, True]
