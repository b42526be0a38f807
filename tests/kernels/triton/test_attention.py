"""Paged attention on a GPU, against a naive loop."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_case import Case

MIX = [(0, 5), (37, 1), (20, 3), (0, 1), (3, 21), (11, 1)]


@pytest.fixture
def compute(device, unsynchronised):
    """Return a function that computes a case without waiting for the device; its result includes padding."""
    from infd.kernels.triton.attention import PagedAttention

    def run(case: Case, programs: int = 1):
        case.move(device)
        with unsynchronised():
            out = case.compute(PagedAttention(programs))
        return out.cpu()

    return run


@pytest.fixture
def error(compute):
    """Return a function that measures a case's largest error, relative for results above 1."""

    def measure(case: Case, programs: int = 1) -> float:
        expected = case.expected()
        out = compute(case, programs).double()
        assert out.isfinite().all()
        return float(((out[: len(expected)] - expected).abs() / expected.abs().clamp(min=1)).max())

    return measure


@pytest.mark.parametrize(
    ("shared", "head", "page_tokens", "window", "softcap"),
    [(2, 8, 4, None, None), (3, 24, 3, 7, None), (9, 16, 16, None, 0.5), (1, 80, 1, 30, 3.0), (4, 16, 2, 1, None)],
)
def test_any_mix_of_spans_equals_the_naive_loop(error, shared, head, page_tokens, window, softcap):
    shape = {"shared": shared, "head": head, "page_tokens": page_tokens}
    assert error(Case(MIX, window=window, softcap=softcap, padding=2, slack=3, **shape)) < 2e-6


@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (40, None)])
def test_a_span_of_many_tiles_is_exact_in_each(error, window, softcap):
    assert error(Case([(37, 50)], window=window, softcap=softcap, shared=3, page_tokens=16)) < 2e-6


@pytest.mark.parametrize("lengths", [[(400, 1), (600, 2), (3, 1)], [(300, 20), (2, 1)]])
@pytest.mark.parametrize("window", [None, 290])
def test_keys_that_are_split_are_merged(error, triton, lengths, window):
    from infd.kernels.triton.blocks import Gpu
    from infd.kernels.triton.tiles import Shape, tile_step

    case = Case(lengths, window=window, page_tokens=16, padding=1)
    shape = Shape(2, 2, 8, torch.float32)
    assert any(each.firsts is not None for each in tile_step(case.batch, shape, shape.default_tiling(Gpu()), 1000))
    assert error(case, programs=1000) < 2e-6


def test_empty_parts_of_keys_change_nothing(error):
    assert error(Case([(5, 1), (0, 1), (40, 1)], page_tokens=16, slack=900), programs=1000) < 2e-6


def test_the_tiles_of_a_batch_that_fills_the_device_are_not_split(triton):
    from infd.kernels.triton.blocks import Gpu
    from infd.kernels.triton.tiles import Shape, tile_step

    case, shape = Case([(600, 1)] * 9, page_tokens=16), Shape(2, 2, 8, torch.float32)
    (whole,) = tile_step(case.batch, shape, shape.default_tiling(Gpu()), 18)
    assert (whole.firsts, len(whole.tiles)) == (None, 9)


@pytest.mark.parametrize(("dtype", "head", "softcap"), [(torch.bfloat16, 256, 2.0), (torch.float16, 64, None)])
def test_half_precision_accumulates_in_float32(compute, dtype, head, softcap):
    # Summing 600 keys in bfloat16 would give errors far above one rounding of the result.
    case = Case([(600, 1), (3, 20)], dtype=dtype, head=head, softcap=softcap, page_tokens=16)
    expected = case.expected()
    out = compute(case, 4)
    assert bool(((out - expected).abs() < 0.006 + expected.abs() / 128).all())


@pytest.mark.parametrize(("programs", "softcap"), [(1, None), (1000, None), (1000, 3.0)])
def test_a_sink_takes_its_share_of_the_attention_weights(error, programs, softcap):
    lengths = [(400, 1), (600, 2), (0, 1), (300, 20)]
    assert error(Case(lengths, page_tokens=16, sinks=True, softcap=softcap, padding=1), programs) < 2e-6


@pytest.mark.parametrize("programs", [1, 1000])
def test_a_cache_of_8_bit_floats_is_read_by_the_scales_of_its_heads(error, programs):
    case = Case([*MIX, (500, 1)], page_tokens=16, held=torch.float8_e4m3fn, padding=2, slack=3)
    assert error(case, programs) < 2e-6


def test_padding_writes_to_the_scratch_page_only(compute):
    case = Case([(3, 1)], padding=3)
    used = {page for span in case.spans for page in span.table}
    assert compute(case).isfinite().all()
    untouched = [page for page in range(1, len(case.pages.k)) if page not in used]
    assert untouched
    assert case.pages.k[untouched].isnan().all()


def test_nan_in_a_key_that_is_seen_shows(compute):
    case = Case([(6, 1), (2, 1)])
    case.pages.k[case.spans[0].table[0]] = torch.nan
    assert compute(case).isfinite().flatten(1).all(1).tolist() == [False, True]


def test_queries_keys_and_values_may_be_views_of_one_product(device):
    from infd.kernels.triton.attention import PagedAttention

    case = Case([(5, 3)], page_tokens=4)
    expected = case.expected()
    case.move(device)
    (k, v), q = case.kv[0], case.q
    fused = torch.cat((q, k[5:], v[5:]), 1)
    q, k, v = fused.split((4, 2, 2), 1)
    plan = PagedAttention(1).prepare(case.batch)
    plan.write(k, v, case.pages)
    torch.testing.assert_close(plan.run(q, case.pages, scale=case.scale).cpu().double(), expected, atol=1e-6, rtol=1e-5)
