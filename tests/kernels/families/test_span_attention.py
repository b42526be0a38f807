"""Attention without a cache: every implementation against the definition, in float64."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.families.span_attention import WHOLE, Reach, SpanBatch
from infd.kernels.reference.span_attention import SpanAttention
from tests.kernels.values import draw

LENGTHS = (5, 1, 70, 0, 33, 130)
PADDING = 3
REACHES = (WHOLE, Reach(4, 4), Reach(after=0), Reach(20, 2), Reach(0, None))


def expected(q, k, v, scale, reach, bias, lengths=LENGTHS):
    """Compute the definition, key by key, [T, H, D] float64; rows of padding are 0."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    group, first = q.shape[1] // k.shape[1], 0
    for length in lengths:
        rows = slice(first, first + length)
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        unseen = torch.zeros(length, length, dtype=torch.bool)
        unseen |= False if reach.before is None else distance < -reach.before
        unseen |= False if reach.after is None else distance > reach.after
        for head in range(q.shape[1]):
            scores = q[rows, head] @ k[rows, head // group].T * scale
            if bias is not None:
                most = bias.shape[1] // 2
                scores += bias[head, distance.clamp(-most, most) + most]
            out[rows, head] = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[rows, head // group]
        first += length
    return out


def inputs(heads, kv_heads, size, dtype, lengths=LENGTHS):
    """Return q, k and v as views of one tensor [T, heads + 2 * kv_heads, size], as a fused product makes them."""
    fused = (draw(sum(lengths) + PADDING, heads + 2 * kv_heads, size, seed=size) * 1.5).to(dtype)
    return fused.split_with_sizes((heads, kv_heads, kv_heads), 1)


def compute(attention, q, k, v, *, lengths=LENGTHS, queries=None, **arguments):
    """queries: the tokens whose results are returned; None: all."""
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    plan = attention.prepare(SpanBatch(tokens=len(q), offsets=offsets, device=q.device, queries=queries))
    return plan.run(q if queries is None else q[queries], k, v, **arguments)


def check(attention, dtype, close):
    """Compare an implementation with the definition, for several reaches, biases, head sizes and groups of heads."""
    for reach in REACHES:
        for heads, kv_heads, size, furthest in ((3, 3, 32, 0), (4, 2, 12, 40), (2, 1, 80, 3)):
            q, k, v = inputs(heads, kv_heads, size, dtype)
            bias = draw(heads, 2 * furthest + 1, seed=3) * 2 if furthest else None
            ours = compute(attention, q, k, v, scale=0.2, reach=reach, bias=bias)
            theirs = expected(q, k, v, 0.2, reach, bias)
            assert ours.dtype is dtype
            used = sum(LENGTHS)
            assert (ours[:used] - theirs[:used]).abs().max() < close, (reach, heads, size)
            assert ours.isfinite().all()


def test_the_reference_computes_the_definition():
    check(SpanAttention(), torch.float32, 1e-5)
    check(SpanAttention(), torch.bfloat16, 4e-2)


def test_native_code_computes_the_definition(library):
    from infd.kernels.cpu.span_attention import SpanAttention as Native

    check(Native(library), torch.float32, 1e-5)
    check(Native(library), torch.bfloat16, 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_spans_and_threads_do_not_change_a_bit_of_native_results(library, dtype):
    from infd.kernels.cpu.span_attention import SpanAttention as Native

    q, k, v = inputs(4, 4, 32, dtype)
    together = compute(Native(library), q, k, v, scale=0.2, reach=Reach(60, 60))
    first, threads = 0, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for length in LENGTHS:
            rows = slice(first, first + length)
            alone = compute(
                Native(library), q[rows], k[rows], v[rows], lengths=(length,), scale=0.2, reach=Reach(60, 60)
            )
            assert together[rows].equal(alone)
            first += length
    finally:
        torch.set_num_threads(threads)


LONG = (5, 1, 600, 0, 33, 9)
READ = [0, 5, 6, 7, 261, 262, 263, 320, 605, 605, 606, 638, 639, 647, 647]  # of these texts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["native", "reference"])
def test_queries_alone_have_the_bits_they_have_among_all(library, attention, dtype):
    from infd.kernels.cpu.span_attention import SpanAttention as Native

    kernel = Native(library) if attention == "native" else SpanAttention()
    for reach in (*REACHES, Reach(60, 90)):
        for heads, kv_heads, size, furthest in ((3, 3, 32, 0), (4, 2, 12, 40), (10, 1, 16, 0), (2, 1, 80, 3)):
            q, k, v = inputs(heads, kv_heads, size, dtype, lengths=LONG)
            bias = draw(heads, 2 * furthest + 1, seed=3) * 2 if furthest else None
            every, alone = (
                compute(kernel, q, k, v, lengths=LONG, queries=queries, scale=0.2, reach=reach, bias=bias)
                for queries in (None, READ)
            )
            assert alone.equal(every[READ]), (reach, heads, size)
            assert compute(kernel, q, k, v, lengths=LONG, queries=[], scale=0.2, reach=reach, bias=bias).numel() == 0


def steps_of_scores(dtype):
    """Return q, k, v of a text. Between ranges of keys its scores rise by powers of two of 15, 40 and 300."""
    q, k, v = (x.contiguous() for x in inputs(2, 2, 32, dtype, lengths=(330,)))
    q[:, :, 0], k[:, :, 0] = 16, 0
    for first, rise in ((0, -100), (64, -90), (130, -65), (200, 140), (260, 20)):
        k[first:, :, 0] = rise * 0.6931 / (16 * 0.2)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_may_rise_by_any_factor_along_the_keys(library, dtype):
    from infd.kernels.cpu.span_attention import SpanAttention as Native

    q, k, v = steps_of_scores(dtype)
    for reach in (WHOLE, Reach(after=0), Reach(70, 20)):
        ours = compute(Native(library), q, k, v, lengths=(330,), scale=0.2, reach=reach)
        theirs = expected(q, k, v, 0.2, reach, None, lengths=(330,))
        close = 1e-4 if dtype is torch.float32 else 4e-2
        assert (ours[:330] - theirs[:330]).abs().max() < close, reach


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", REACHES)
def test_other_queries_of_a_text_do_not_change_a_bit_of_native_results(library, dtype, reach):
    from infd.kernels.cpu.span_attention import SpanAttention as Native

    q, k, v = steps_of_scores(dtype)
    mild = q.clone()
    mild[:, :, 0] = 0.1
    for kept in (slice(0, None, 7), slice(3, None, 5)):
        mixed = q.clone()
        mixed[kept] = mild[kept]
        ours, alike = (compute(Native(library), x, k, v, lengths=(330,), scale=0.2, reach=reach) for x in (mixed, mild))
        assert ours[:330][kept].equal(alike[:330][kept])
        assert not ours[:330].equal(alike[:330])
