"""Products with packed weights, against float64 and against themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from infd.kernels.cpu.linear import Matrices
from infd.kernels.reference import dense

SHAPES = [(64, 64), (1, 1), (63, 2), (65, 7), (200, 129), (130, 2050), (32, 4099)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 31, 64, 241, 500]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(library, weight: torch.Tensor):
    """Return a weight's form and what it keeps."""
    form = Matrices(library).form(*weight.shape, torch.bfloat16)
    kept = torch.full(form.shape, torch.nan, dtype=form.dtype)  # as memory may hold anything
    form.place(kept, 0, weight)
    return form, kept


def bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return how far float32 sums along the inputs, and of a bias of about 1, may be off."""
    sums = x.double().abs() @ weight.double().abs().T + 4
    return sums * (weight.shape[1] + 2) * 2.0**-24


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_right_within_one_rounding_to_bfloat16(library, outputs, inputs, with_bias):
    weight = draw(outputs, inputs, seed=1)
    bias = draw(outputs, seed=2) if with_bias else None
    form, kept = packed(library, weight)
    for rows in ROWS:
        x = draw(rows, inputs, seed=rows)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        product, wide = form.multiply(x, kept, bias), form.multiply(x, kept, bias, wide=True)
        assert (product.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
        assert ((wide.double() - exact).abs() <= bound(x, weight)).all(), f"{rows} rows"
        assert product.equal(wide.bfloat16()), f"{rows} rows"


@pytest.mark.parametrize(("outputs", "inputs"), [(200, 129), (130, 2050)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_the_same_to_the_bit_whoever_stands_beside_it(library, outputs, inputs, threads):
    form, kept = packed(library, draw(outputs, inputs, seed=1))
    x = draw(max(ROWS), inputs)
    alone = torch.cat([form.multiply(x[i : i + 1], kept) for i in range(len(x))])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in ROWS:
            assert form.multiply(x[:rows], kept).equal(alone[:rows])
            assert form.multiply(x[-rows:], kept).equal(alone[-rows:])
    finally:
        torch.set_num_threads(before)


def test_rows_may_stand_apart(library):
    weight, x = draw(70, 66), draw(5, 200)
    form, kept = packed(library, weight)
    assert form.multiply(x[:, 3:69], kept).equal(form.multiply(x[:, 3:69].contiguous(), kept))
    assert form.multiply(x.T[:66, :3].T, kept).equal(form.multiply(x.T[:66, :3].T.contiguous(), kept))


def test_no_rows_give_no_rows(library):
    form, kept = packed(library, draw(70, 66))
    assert form.multiply(draw(0, 66), kept).shape == (0, 70)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_looked_up_as_they_were_placed(library, outputs, inputs):
    weight = draw(outputs, inputs)
    form, kept = packed(library, weight)
    tokens = torch.arange(outputs).flip(0).repeat(2)
    assert form.look_up(tokens, kept).equal(weight[tokens])


@pytest.mark.parametrize("cuts", [[0, 200], [0, 1, 64, 65, 200], [0, 63, 129, 130, 199, 200], [0, 100, 200]])
def test_rows_are_placed_in_parts_that_begin_anywhere(library, cuts):
    weight = draw(200, 67)
    form, whole = packed(library, weight)
    kept = torch.zeros_like(whole)
    for first, last in reversed(list(itertools.pairwise(cuts))):
        form.place(kept, first, weight[first:last])
    assert form.look_up(torch.arange(200), kept).equal(weight)
    assert form.multiply(weight, kept).equal(form.multiply(weight, whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_types_are_rounded_when_they_are_placed(library, dtype):
    weight = torch.randn(70, 66).to(dtype)
    form, kept = packed(library, weight)
    assert form.look_up(torch.arange(70), kept).equal(weight.bfloat16())


def test_a_row_that_does_not_exist_is_not_a_number(library):
    form, kept = packed(library, draw(70, 66))
    assert form.look_up(torch.tensor([1, 70, -1]), kept).isnan().all(1).tolist() == [False, True, True]


def test_a_row_that_is_not_finite_spoils_only_itself(library):
    form, kept = packed(library, draw(70, 66))
    x = draw(9, 66)
    sound = form.multiply(x, kept)
    x[4, 7] = float("nan")
    x[5, 65] = float("inf")
    broken = form.multiply(x, kept)
    assert broken[4].isnan().all()
    assert not broken[5].isfinite().any()
    rest = [0, 1, 2, 3, 6, 7, 8]
    assert broken[rest].equal(sound[rest])


def test_the_form_means_what_the_plain_form_means(library):
    weight, x, bias = draw(96, 80), draw(9, 80, seed=1), draw(96, seed=2)
    form, kept = packed(library, weight)
    plain = dense.Matrices().form(96, 80, torch.bfloat16)
    torch.testing.assert_close(form.multiply(x, kept, bias), plain.multiply(x, weight, bias), rtol=2**-7, atol=2**-6)
    tokens = torch.tensor([[3, 95, 0]])[0]
    assert form.look_up(tokens, kept).equal(plain.look_up(tokens, weight))
