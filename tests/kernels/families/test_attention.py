"""Every implementation of attention, against a naive loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from infd.kernels.cpu.library import BEST_FIRST
from infd.kernels.reference.attention import PagedAttention
from tests.kernels.attention_case import Case, implementation


@pytest.fixture(scope="module", params=["reference", *BEST_FIRST])
def attention(request):
    return implementation(request, PagedAttention)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3) | st.integers(1, 9)), min_size=1, max_size=6),
    shared=st.integers(1, 3) | st.just(9),
    head=st.sampled_from([8, 16, 24, 80]),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
    padding=st.integers(0, 3),
    slack=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_any_mix_of_spans_equals_the_naive_loop(attention, lengths, **case):
    assert Case(lengths, **case).error(attention) < 1e-5


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, 3.0)])
def test_a_sink_takes_its_share_of_the_attention_weights(attention, window, softcap):
    case = Case(
        [(40, 1), (0, 1), (37, 300), (1300, 2)], window=window, softcap=softcap, shared=3, sinks=True, padding=1
    )
    assert case.error(attention) < 1e-5


def test_a_cache_of_8_bit_floats_is_read_by_the_scales_of_its_heads():
    case = Case([(40, 1), (0, 3), (37, 300)], shared=3, held=torch.float8_e4m3fn)
    assert case.error(PagedAttention()) < 1e-5


def sees_one_more(batch):
    return replace(batch, start=batch.start + 1)


def sees_one_less(batch):
    return replace(batch, start=batch.start - 1)


def looks_one_further_back(batch):
    return replace(batch, window=batch.window + 1)


def takes_the_pages_of_a_neighbour(batch):
    return replace(batch, table=batch.table.flip(0))


def ignores_the_window(batch):
    return replace(batch, window=None)


@pytest.mark.parametrize(
    "broken",
    [sees_one_more, sees_one_less, looks_one_further_back, takes_the_pages_of_a_neighbour, ignores_the_window],
)
def test_a_broken_kernel_is_noticed(attention, broken):
    class Broken:
        def prepare(self, batch):
            return attention.prepare(broken(batch))

    case = Case([(50, 1), (49, 1)], window=30)
    case.pages.k.nan_to_num_()
    case.pages.v.nan_to_num_()
    assert case.error(attention) < 1e-5
    assert case.error(Broken()) > 1e-3


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_span_longer_than_a_block_of_queries_is_exact_in_every_block(attention, window, softcap):
    assert Case([(37, 530)], window=window, softcap=softcap, shared=2, page_tokens=16).error(attention) < 1e-5


@pytest.mark.parametrize("head", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision_accumulates_in_float32(attention, head, softcap):
    # Summing 600 keys in bfloat16 would give errors far above one rounding of the result.
    case = Case([(600, 1), (590, 2), (3, 40)], dtype=torch.bfloat16, head=head, softcap=softcap)
    out, expected = case.compute(attention), case.expected()
    assert bool(((out - expected).abs() < 0.004 + expected.abs() / 256).all())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_reference_computes_float16_too(softcap):
    assert Case([(600, 1), (590, 2)], dtype=torch.float16, softcap=softcap).error(PagedAttention()) < 0.01


def test_one_long_sequence_does_not_pad_the_short_ones():
    case = Case([(400, 1), (3, 1), (50, 1), (390, 1)])
    widths = sorted(part._keys.positions.shape for part in PagedAttention().prepare(case.batch)._parts)
    assert widths == [(2, 52), (2, 404)]


def test_a_window_reads_only_the_pages_it_reaches():
    case = Case([(400, 1)], window=8)
    (part,) = PagedAttention().prepare(case.batch)._parts
    assert part._keys.pages.shape == (1, 3)
    assert case.error(PagedAttention()) < 1e-5


def test_many_sequences_are_cut_into_buckets_that_stay_in_the_cache():
    case = Case([(299, 1)] * 20)
    assert [len(part._keys.pages) for part in PagedAttention().prepare(case.batch)._parts] == [6, 6, 6, 2]
    assert case.error(PagedAttention()) < 1e-5


def test_padding_writes_to_the_scratch_page_only(attention):
    case = Case([(3, 1)], padding=3)
    used = {page for span in case.spans for page in span.table}
    case.compute(attention)
    untouched = [page for page in range(1, len(case.pages.k)) if page not in used]
    assert untouched
    assert case.pages.k[untouched].isnan().all()


def test_nan_in_a_key_that_is_seen_shows(attention):
    case = Case([(6, 1), (2, 1)])
    case.pages.k[case.spans[0].table[0]] = torch.nan
    finite = case.compute(attention).isfinite().flatten(1).all(1)
    assert finite.tolist() == [False, True]
