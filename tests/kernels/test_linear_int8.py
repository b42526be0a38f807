"""Products with weights of int8, against whole numbers in float64, the plain form, and the product that was meant."""

from __future__ import annotations

import itertools

import pytest
import torch

from infd.kernels.cpu.linear_int8 import Matrices
from infd.kernels.reference import int8 as reference

SHAPES = [(64, 64), (1, 1), (63, 2), (65, 7), (200, 129), (130, 2050), (66, 4399)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 31, 241]
DTYPES = [torch.bfloat16, torch.float32]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(library, weight: torch.Tensor, activations: torch.dtype = torch.bfloat16):
    """Return a weight's form and what it keeps."""
    form = Matrices(library).form(*weight.shape, activations)
    kept = torch.full(form.shape, -(2**31) + 77, dtype=form.dtype)  # as memory may hold anything
    form.place(kept, 0, weight)
    return form, kept


def plain(weight: torch.Tensor, activations: torch.dtype = torch.bfloat16):
    form = reference.Matrices().form(*weight.shape, activations)
    kept = torch.full(form.shape, 77, dtype=form.dtype)
    form.place(kept, 0, weight)
    return form, kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_native_numbers_are_those_of_the_plain_form_to_the_bit(library, outputs, inputs, dtype):
    weight = draw(outputs, inputs, seed=1, dtype=dtype)
    (form, kept), (meant, meant_kept) = packed(library, weight, dtype), plain(weight, dtype)
    for rows in ROWS:
        x = draw(rows, inputs, seed=rows, dtype=dtype)
        wide = form.multiply(x, kept, wide=True)
        assert wide.dtype is torch.float32
        assert wide.equal(meant.multiply(x, meant_kept, wide=True)), f"{rows} rows"
        assert form.multiply(x, kept).equal(wide.to(dtype)), f"{rows} rows"
    tokens = torch.arange(outputs).flip(0).repeat(2)
    looked_up = form.look_up(tokens, kept)
    assert looked_up.dtype is dtype
    assert looked_up.equal(meant.look_up(tokens, meant_kept))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_one_of_whole_numbers_with_their_scales(outputs, inputs):
    weight, x, bias = draw(outputs, inputs, seed=1), draw(9, inputs), draw(outputs, seed=2)
    for rows in (weight, x):
        numbers, scales = reference.quantize(rows)
        assert numbers.abs().amax(1).eq(127).all()
        steps = rows.double() / (rows.double().abs().amax(1, keepdim=True) / 127)
        assert (numbers - steps).abs().max() < 0.5001  # what stands halfway may go either way
        torch.testing.assert_close(numbers * scales, rows.float(), rtol=0, atol=0.501 * scales.max().item())
    (w, weight_scales), (numbers, scales) = reference.quantize(weight), reference.quantize(x)
    exact = (numbers.double() @ w.double().T) * scales.double() * weight_scales.double().T + bias.double()
    form, kept = plain(weight)
    torch.testing.assert_close(form.multiply(x, kept, bias, wide=True).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_before_rounding(library, dtype):
    weight, x, bias = draw(70, 66, dtype=dtype), draw(9, 66, dtype=dtype), draw(70, seed=2, dtype=dtype)
    form, kept = packed(library, weight, dtype)
    expected = form.multiply(x, kept, wide=True).double() + bias.double()
    wide = form.multiply(x, kept, bias, wide=True)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-6, atol=1e-6)
    assert form.multiply(x, kept, bias).equal(wide.to(dtype))


@pytest.mark.parametrize(("outputs", "inputs"), [(130, 2050), (66, 4399)])
def test_a_product_is_near_the_one_without_quantization(library, outputs, inputs):
    # Each of the two numbers of a product is off by half a scale at most, evenly spread: 1 / sqrt(12) of it.
    weight, x = draw(outputs, inputs, seed=1), draw(64, inputs)
    form, kept = packed(library, weight)
    off = form.multiply(x, kept, wide=True).double() - x.double() @ weight.double().T
    spread = (x.abs().amax(1).double().mean() + weight.abs().amax(1).double().mean()) / 127 / 12**0.5
    assert off.square().mean().sqrt() < 1.1 * spread * inputs**0.5


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_to_the_bit_whoever_stands_beside_it(library, threads):
    form, kept = packed(library, draw(200, 4400, seed=1))
    x = draw(max(ROWS), 4400)
    alone = torch.cat([form.multiply(x[i : i + 1], kept) for i in range(len(x))])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            assert form.multiply(x[:rows], kept).equal(alone[:rows])
            assert form.multiply(x[-rows:], kept).equal(alone[-rows:])
    finally:
        torch.set_num_threads(before)


def test_the_largest_sums_fit(library):
    form, kept = packed(library, torch.ones(64, 100_000).bfloat16())
    x = torch.ones(3, 100_000).bfloat16()
    x[1] = -1
    expected = torch.tensor([100_000.0, -100_000.0, 100_000.0])[:, None].expand(3, 64)
    torch.testing.assert_close(form.multiply(x, kept, wide=True), expected, rtol=1e-6, atol=0)


def test_numbers_at_both_ends_are_kept(library):
    # 127 * 127 twice would not fit into a product of 16 bits; -1 and 1 tell signs apart.
    weight = torch.tensor([[1.0, -1.0] * 33, [-1.0, 1.0] * 33])
    form, kept = packed(library, weight, torch.float32)
    product = form.multiply(weight, kept)
    torch.testing.assert_close(product, torch.tensor([[66.0, -66.0], [-66.0, 66.0]]), rtol=1e-6, atol=0)


def test_memory_that_was_never_filled_is_a_matrix_of_zeros(library):
    form = Matrices(library).form(70, 66, torch.bfloat16)
    kept = torch.zeros(form.shape, dtype=form.dtype)
    assert not form.multiply(draw(9, 66), kept).any()
    assert not form.look_up(torch.arange(70), kept).any()


def test_rows_of_zeros_give_zeros(library):
    weight = draw(70, 66)
    weight[3] = 0
    form, kept = packed(library, weight)
    x = draw(4, 66)
    x[2], x[3] = 0, 1e-35
    product = form.multiply(x, kept)
    assert not product[2:].any()
    assert not product[:, 3].any()
    assert product[0, :3].all()


def test_rows_may_stand_apart(library):
    weight, x = draw(70, 66), draw(5, 200)
    form, kept = packed(library, weight)
    assert form.multiply(x[:, 3:69], kept).equal(form.multiply(x[:, 3:69].contiguous(), kept))
    assert form.multiply(x.T[:66, :3].T, kept).equal(form.multiply(x.T[:66, :3].T.contiguous(), kept))


def test_no_rows_give_no_rows(library):
    form, kept = packed(library, draw(70, 66))
    assert form.multiply(draw(0, 66), kept).shape == (0, 70)


@pytest.mark.parametrize("cuts", [[0, 200], [0, 1, 64, 65, 200], [0, 63, 129, 130, 199, 200], [0, 100, 200]])
def test_rows_are_placed_in_parts_that_begin_anywhere(library, cuts):
    weight, x = draw(200, 67), draw(9, 67, seed=1)
    form, whole_kept = packed(library, weight)
    kept = torch.full_like(whole_kept, 2**31 - 5)
    for first, last in reversed(list(itertools.pairwise(cuts))):
        form.place(kept, first, weight[first:last])
    assert form.look_up(torch.arange(200), kept).equal(form.look_up(torch.arange(200), whole_kept))
    assert form.multiply(x, kept).equal(form.multiply(x, whole_kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_weights_of_any_type_are_quantized_from_what_they_are(library, dtype):
    weight, x = torch.randn(70, 66).to(dtype), draw(9, 66)
    (form, kept), (meant, meant_kept) = packed(library, weight), plain(weight)
    assert form.multiply(x, kept).equal(meant.multiply(x, meant_kept))


def test_a_row_that_does_not_exist_is_not_a_number(library):
    form, kept = packed(library, draw(70, 66))
    assert form.look_up(torch.tensor([1, 70, -1]), kept).isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize("place", [0, 7, 65])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_row_that_is_not_finite_spoils_only_itself(library, place, bad):
    weight, x = draw(70, 66), draw(9, 66)
    form, kept = packed(library, weight)
    sound = form.multiply(x, kept)
    x[4, place] = float(bad)
    broken = form.multiply(x, kept)
    assert broken[4].isnan().all()
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert broken[rest].equal(sound[rest])

    weight[2, place] = float(bad)
    form, kept = packed(library, weight)
    broken = form.multiply(x, kept)
    assert broken[:, 2].isnan().all()
    assert broken[rest][:, 3:].equal(sound[rest][:, 3:])
    assert form.look_up(torch.tensor([2]), kept).isnan().all()
