"""Guarantees of native attention beyond the family's contract, which `families/test_attention.py` tests."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.attention import PagedAttention
from tests.kernels.attention_case import Case

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def attention(library):
    return PagedAttention(library)


@pytest.fixture
def threads():
    """torch.set_num_threads; the number of threads is restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def alone(case: Case, attention: PagedAttention, span: int) -> torch.Tensor:
    """Compute one span of a case in a step of its own, over the case's filled cache."""
    offset = case.batch.offsets[span]
    batch = type(case.batch)(
        page_tokens=case.batch.page_tokens,
        window=case.batch.window,
        starts=[case.batch.starts[span]],
        counts=[case.batch.counts[span]],
        offsets=[0, case.batch.counts[span]],
        start=case.batch.start[span : span + 1],
        table=case.batch.table[span : span + 1],
        slots=case.batch.slots[offset : case.batch.offsets[span + 1]],
    )
    q = case.q[offset : case.batch.offsets[span + 1]]
    return attention.prepare(batch).run(q, case.pages, scale=case.scale, softcap=case.softcap)


@BOTH
@pytest.mark.parametrize("window", [None, 700])
def test_other_spans_do_not_change_a_bit(attention, dtype, window):
    case = Case(
        [(1200, 1), (5, 1), (300, 40), (520, 3), (1023, 1)], window=window, dtype=dtype, head=64, page_tokens=16
    )
    together = case.compute(attention).split(case.batch.counts)
    for span, rows in enumerate(together):
        assert rows.equal(alone(case, attention, span))


@BOTH
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("window", [None, 515])
@pytest.mark.parametrize("count", [2, 5, 16])
def test_a_query_of_a_short_span_has_the_bits_of_a_span_of_one_token(attention, dtype, quantized, window, count):
    """So a draft that is verified, and the token behind it, are those of decoding token by token."""
    starts = 1020, 3, 60, 505, 700
    lengths = [(start, count) for start in starts]
    case = Case(lengths, window=window, dtype=dtype, quantized=quantized, head=64, page_tokens=16, shared=3)
    together = case.compute(attention)
    for span, (start, _) in enumerate(case.lengths):
        for query in range(count):
            at = case.batch.offsets[span] + query
            batch = type(case.batch)(
                page_tokens=case.batch.page_tokens,
                window=window,
                starts=[start + query],
                counts=[1],
                offsets=[0, 1],
                start=torch.tensor([start + query], dtype=torch.int32),
                table=case.batch.table[span : span + 1],
                slots=case.batch.slots[at : at + 1],
            )
            alone = attention.prepare(batch).run(case.q[at : at + 1], case.pages, scale=case.scale)
            assert together[at : at + 1].equal(alone)


@BOTH
def test_threads_do_not_change_a_bit(attention, threads, dtype):
    case = Case([(1200, 1), (300, 40), (0, 90), (2000, 1)], dtype=dtype, head=64, page_tokens=16)
    threads(1)
    one = case.compute(attention)
    threads(3)
    assert case.compute(attention).equal(one)


@pytest.mark.parametrize("window", [None, 513, 900])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_long_row_is_merged_from_its_splits(attention, window, softcap):
    case = Case([(1700, 1), (511, 1), (512, 2), (1023, 5)], window=window, softcap=softcap, head=16, page_tokens=16)
    assert case.error(attention) < 1e-5


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 71])
@BOTH
def test_any_number_of_heads_may_share_keys(attention, shared, dtype):
    case = Case([(130, 1), (7, 3)], shared=shared, head=32, page_tokens=16, dtype=dtype)
    assert case.error(attention) < (1e-5 if dtype is torch.float32 else 0.012)


@pytest.mark.parametrize("head", [2, 6, 7, 8, 17, 24, 40, 48, 64, 80, 96, 112, 128, 192, 256])
@BOTH
def test_a_head_may_have_any_size(attention, head, dtype):
    case = Case([(130, 1), (7, 30)], head=head, page_tokens=16, dtype=dtype)
    assert case.error(attention) < (1e-5 if dtype is torch.float32 else 0.012)


@pytest.mark.parametrize("shared", [1, 2, 3, 5])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("sinks", [False, True])
@BOTH
def test_a_prompt_of_any_size_is_exact_in_every_query(attention, shared, window, sinks, dtype):
    case = Case(
        [(37, 533), (0, 17), (100, 66)], shared=shared, window=window, sinks=sinks, head=32, page_tokens=16, dtype=dtype
    )
    assert case.error(attention) < (1e-5 if dtype is torch.float32 else 0.012)


def test_how_a_prompt_is_cut_changes_rounding_only(attention):
    case = Case([(0, 200)], head=64, page_tokens=16)
    whole = case.compute(attention)
    (span,) = case.spans
    for start, count in [(0, 1), (1, 15), (16, 16), (32, 17), (49, 151)]:
        part = Case([(start, count)], head=64, page_tokens=16)
        part.pages, part.q = case.pages, case.q[start : start + count]
        part.batch.table = torch.tensor([span.table], dtype=torch.int32)
        plan = attention.prepare(part.batch)
        torch.testing.assert_close(
            plan.run(part.q, case.pages, scale=case.scale), whole[start : start + count], rtol=0, atol=2e-6
        )


@BOTH
@pytest.mark.parametrize("start", [0, 40, 256])
def test_a_query_alone_has_nearly_always_the_bits_of_one_in_a_prompt(attention, dtype, start):
    """Otherwise answers would change with what of a prompt is found in the cache."""
    count = 40
    case = Case([(start, count)], dtype=dtype, head=64, page_tokens=16, shared=2)
    together, one = case.compute(attention), []
    for query in range(count):
        batch = type(case.batch)(
            page_tokens=case.batch.page_tokens,
            window=None,
            starts=[start + query],
            counts=[1],
            offsets=[0, 1],
            start=case.batch.start + query,
            table=case.batch.table,
            slots=case.batch.slots[query : query + 1],
        )
        one.append(attention.prepare(batch).run(case.q[query : query + 1], case.pages, scale=case.scale))
    differ = (torch.cat(one) != together).float().mean().item()
    if dtype is torch.bfloat16:
        assert differ < 0.005
    torch.testing.assert_close(torch.cat(one), together, rtol=2**-7, atol=1e-3)


def test_queries_may_be_a_view_of_a_fused_product(attention):
    case = Case([(100, 1), (3, 20)], head=16, page_tokens=16)
    expected = case.compute(attention)
    beside = torch.full((case.q.shape[0], case.q.shape[1] + 4, case.q.shape[2]), torch.nan)
    beside[:, : case.q.shape[1]] = case.q
    q = beside[:, : case.q.shape[1]]
    assert not q.is_contiguous()
    assert attention.prepare(case.batch).run(q, case.pages, scale=case.scale).equal(expected)


def test_padding_comes_out_as_zeros(attention):
    case = Case([(30, 1)], padding=3, head=16)
    case.q[1:] = torch.nan
    assert case.compute(attention)[1:].equal(torch.zeros(3, 4, 16))


@BOTH
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("start", [3, 126, 700])
def test_a_nan_of_a_draft_does_not_reach_the_queries_before_it(attention, where, start, dtype):
    case = Case([(start, 4)], head=64, page_tokens=16, dtype=dtype, shared=3)
    case.compute(attention)
    page, offset = divmod(int(case.batch.slots[3]), 16)
    getattr(case.pages, where)[page, :, offset] = torch.nan
    finite = attention.prepare(case.batch).run(case.q, case.pages, scale=case.scale).isfinite().flatten(1).all(1)
    assert finite.tolist() == [True, True, True, False]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@BOTH
def test_a_nan_affects_only_its_own_rows(attention, poison, where, dtype):
    case = Case([(900, 1), (2, 1), (60, 20)], head=32, page_tokens=16, dtype=dtype)
    case.compute(attention)
    getattr(case.pages, where)[case.spans[0].table[3]] = poison
    finite = attention.prepare(case.batch).run(case.q, case.pages, scale=case.scale).isfinite().flatten(1).all(1)
    assert finite.tolist() == [False] + [True] * 21


@BOTH
@pytest.mark.parametrize(("count", "head"), [(40, 48), (17, 64), (33, 80)])
def test_what_an_earlier_step_left_in_scratch_memory_does_not_matter(attention, threads, count, head, dtype):
    threads(1)
    before = Case([(0, 64)], head=96, page_tokens=16, dtype=dtype)
    before.q.fill_(torch.nan)
    before.kv = [(torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)) for k, v in before.kv]
    assert before.compute(attention).isnan().all()
    assert Case([(0, count)], head=head, page_tokens=16, dtype=dtype).compute(attention).isfinite().all()
