"""Attention over an int8 cache, against a naive loop over the dequantized cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.kernels.cpu.library import BEST_FIRST
from infd.kernels.families.attention import KeyValuePages
from infd.kernels.reference import int8
from infd.kernels.reference.attention import Int8PagedAttention
from tests.kernels.attention_case import Case, implementation
from tests.kernels.paging import PagedSpan, attention_batch

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
BOUND = {torch.float32: 1e-5, torch.bfloat16: 0.012}


@pytest.fixture(scope="module", params=["reference", *BEST_FIRST])
def attention(request):
    return implementation(request, Int8PagedAttention)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3) | st.integers(1, 9)), min_size=1, max_size=6),
    shared=st.integers(1, 3) | st.just(9),
    head=st.sampled_from([7, 8, 24, 80]),
    page_tokens=st.sampled_from([1, 3, 16]),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.just(3.0),
    padding=st.integers(0, 3),
    slack=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=20)
def test_any_mix_of_spans_equals_the_naive_loop(attention, lengths, **case):
    assert Case(lengths, quantized=True, **case).error(attention) < 1e-5


@pytest.mark.parametrize("head", [2, 6, 17, 24, 40, 64, 80, 128, 256])
@BOTH
def test_a_head_may_have_any_size(attention, head, dtype):
    case = Case([(130, 1), (7, 30)], head=head, page_tokens=16, dtype=dtype, quantized=True)
    assert case.error(attention) < BOUND[dtype]


@BOTH
def test_a_long_row_is_merged_from_its_splits(attention, dtype):
    case = Case([(1700, 1), (511, 1), (1023, 5)], head=16, page_tokens=16, dtype=dtype, quantized=True)
    assert case.error(attention) < BOUND[dtype]


@pytest.mark.parametrize("head", [3, 64, 66])
@BOTH
def test_the_written_cache_equals_the_references_to_the_bit(attention, head, dtype):
    k, v = (torch.randn(5, 2, head, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    k[1, 0], v[2, 1, 0] = 0, torch.inf
    width, kept = attention.row(head, dtype)
    assert (width, kept) == (int8.row_bytes(head), torch.int8)
    pages = KeyValuePages(*(torch.full((3, 2, 4, width), 77, dtype=kept) for _ in range(2)))
    attention.prepare(attention_batch([PagedSpan(1, 5, [2, 1])], page_tokens=4)).write(k, v, pages)
    for cache, rows in zip(pages[:2], (k, v), strict=True):
        expected = torch.full_like(cache, 77)
        for at, (page, slot) in enumerate([(2, 1), (2, 2), (2, 3), (1, 0), (1, 1)]):
            expected[page, :, slot] = int8.pack(rows[at])
        used = int8.SCALE + head
        spoilt = expected[..., :4].contiguous().view(torch.float32).isnan().expand(*expected.shape[:-1], used)
        assert cache[..., :used][~spoilt].equal(expected[..., :used][~spoilt])
        assert cache[..., :4].contiguous().view(torch.float32).isnan().equal(spoilt[..., :1])


def test_a_quantized_row_is_near_the_row_written():
    x = torch.randn(50, 2, 66, generator=torch.Generator().manual_seed(0))
    off = (int8.unpack(int8.pack(x), 66, torch.float32) - x).abs()
    assert (off <= 0.501 * x.abs().amax(-1, keepdim=True) / 127).all()
    assert off.max() > 0


def test_scales_belong_to_one_head_of_one_token(attention):
    case = Case([(60, 1), (40, 20)], head=32, page_tokens=16, quantized=True)
    assert case.error(attention) < 1e-5
    for cache in case.pages[:2]:
        scales = cache[..., :4].contiguous().view(torch.float32)
        cache[..., :4] = scales[scales.isfinite()].mean().expand(scales.shape).contiguous().view(torch.int8)
    plan = attention.prepare(case.batch)
    out = plan.run(case.q, case.pages, scale=case.scale)
    assert (out - case.expected()).abs().max() > 1e-2


@BOTH
def test_other_spans_and_threads_do_not_change_a_bit(attention, dtype):
    if isinstance(attention, Int8PagedAttention):
        pytest.skip("the reference promises it in float32, for singles among singles")
    case = Case([(1200, 1), (5, 1), (300, 40), (520, 3)], dtype=dtype, head=64, page_tokens=16, quantized=True)
    together = case.compute(attention)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert case.compute(attention).equal(together)
    finally:
        torch.set_num_threads(before)
    start, count = case.lengths[3]
    alone = attention_batch([PagedSpan(start, count, case.spans[3].table)], page_tokens=16)
    q = case.q[-count:]
    assert attention.prepare(alone).run(q, case.pages, scale=case.scale).equal(together[-count:])


@pytest.mark.parametrize("where", ["k", "v"])
@BOTH
def test_a_nan_affects_only_its_own_rows(attention, where, dtype):
    case = Case([(900, 1), (2, 1), (60, 20)], head=32, page_tokens=16, dtype=dtype, quantized=True)
    case.compute(attention)
    getattr(case.pages, where)[case.spans[0].table[3]] = -1
    finite = attention.prepare(case.batch).run(case.q, case.pages, scale=case.scale).isfinite().flatten(1).all(1)
    assert finite.tolist() == [False] + [True] * 21
