"""Attention without a cache on a GPU, against the definition."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.families.span_attention import WHOLE, Reach
from tests.kernels.families.test_span_attention import compute, expected, inputs

LENGTHS = (5, 70, 1)
CASES = (
    (WHOLE, 2, 2, 16, 0),
    (Reach(4, 4), 2, 1, 12, 0),
    (Reach(60, 0), 1, 1, 24, 3),
    (WHOLE, 2, 2, 12, 40),
)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_the_kernel_computes_the_definition(device, dtype, close):
    from infd.kernels.triton.span_attention import SpanAttention

    for reach, heads, kv_heads, size, furthest in CASES:
        q, k, v = inputs(heads, kv_heads, size, dtype, LENGTHS)
        bias = torch.randn(heads, 2 * furthest + 1, generator=torch.Generator().manual_seed(3)) if furthest else None
        ours = compute(
            SpanAttention(),
            *(x.to(device) for x in (q, k, v)),
            lengths=LENGTHS,
            scale=0.2,
            reach=reach,
            bias=None if bias is None else bias.to(device),
        )
        used = sum(LENGTHS)
        theirs = expected(q, k, v, 0.2, reach, bias, LENGTHS)
        assert (ours.cpu()[:used] - theirs[:used]).abs().max() < close, (reach, size)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_queries_alone_have_the_results_they_have_among_all(device, dtype, close):
    from infd.kernels.triton.span_attention import SpanAttention

    read = [0, 4, 5, 71, 74, 75, 75]
    for reach, heads, kv_heads, size, furthest in CASES:
        q, k, v = inputs(heads, kv_heads, size, dtype, LENGTHS)
        bias = torch.randn(heads, 2 * furthest + 1, generator=torch.Generator().manual_seed(3)) if furthest else None
        ours = compute(
            SpanAttention(),
            *(x.to(device) for x in (q, k, v)),
            lengths=LENGTHS,
            queries=read,
            scale=0.2,
            reach=reach,
            bias=None if bias is None else bias.to(device),
        )
        theirs = expected(q, k, v, 0.2, reach, bias, LENGTHS)[read]
        assert (ours.cpu() - theirs).abs().max() < close, (reach, size)
