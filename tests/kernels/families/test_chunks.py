"""Attention confined to chunks: spans are divided where chunks begin."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.library import BEST_FIRST
from infd.kernels.families.attention import in_chunks
from infd.kernels.reference.attention import PagedAttention
from infd.scheduler.layout import CacheLayout, PageGroup
from tests.kernels.attention_case import Case, implementation, naive


@pytest.fixture(params=["reference", *BEST_FIRST])
def attention(request):
    return implementation(request, PagedAttention)


@pytest.mark.parametrize("chunk", [4, 8, 12])
def test_a_query_attends_to_its_chunk_up_to_itself(attention, chunk):
    lengths = [(0, 30), (5, 9), (20, 1), (7, 1), (8, 1), (15, 20)]
    case = Case(lengths, page_tokens=4, padding=2)
    case.batch = in_chunks(case.batch, chunk)
    out, offset = case.compute(attention), 0
    for (k, v), (start, count) in zip(case.kv, lengths, strict=True):
        for i in range(count):
            begin = (start + i) // chunk * chunk
            q = case.q[offset + i : offset + i + 1]
            seen = {"scale": case.scale, "window": None, "softcap": None}
            expected = naive(q, k[begin:], v[begin:], start + i - begin, **seen)
            torch.testing.assert_close(out[offset + i : offset + i + 1].double(), expected, atol=1e-5, rtol=1e-5)
        offset += count


def test_pages_before_a_chunk_are_let_go():
    group = PageGroup(layers=(0,), page_tokens=4, chunk=8)
    assert [group.pages_droppable(computed) for computed in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    assert group.pages_needed(9, 12) == range(2, 3)
    assert group.first_missing(16, lambda _: False) is None  # a new chunk reads no cached page
    assert group.first_missing(12, lambda page: page != 2) == 8
    assert CacheLayout((group,)).peak_pages(100, 4) == 4
