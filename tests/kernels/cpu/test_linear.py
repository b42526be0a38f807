"""Products with bfloat16 weights in panels, against float64 and the plain form."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.linear import Matrices
from infd.kernels.reference import dense
from tests.kernels.cpu.placed import Placed, draw

SHAPES = [(64, 64), (1, 1), (63, 2), (65, 7), (200, 129), (130, 2050), (32, 4099)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 31, 64, 241, 500]


def bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the largest rounding error of float32 sums along the inputs, including a bias of about 1."""
    sums = x.double().abs() @ weight.double().abs().T + 4
    return sums * (weight.shape[1] + 2) * 2.0**-24


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_right_within_one_rounding_to_bfloat16(library, outputs, inputs, with_bias):
    weight = draw(outputs, inputs, seed=1)
    bias = draw(outputs, seed=2) if with_bias else None
    placed = Placed(Matrices(library), weight)
    for rows in ROWS:
        x = draw(rows, inputs, seed=rows)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        product, wide = placed.multiply(x, bias), placed.multiply(x, bias, wide=True)
        assert (product.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
        assert ((wide.double() - exact).abs() <= bound(x, weight)).all(), f"{rows} rows"
        assert product.equal(wide.bfloat16()), f"{rows} rows"


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_looked_up_as_they_were_placed(library, outputs, inputs):
    weight = draw(outputs, inputs)
    tokens = torch.arange(outputs).flip(0).repeat(2)
    assert Placed(Matrices(library), weight).look_up(tokens).equal(weight[tokens])


def test_other_types_are_rounded_when_they_are_placed(library):
    weight = torch.randn(70, 66, dtype=torch.float64)
    assert Placed(Matrices(library), weight).look_up(torch.arange(70)).equal(weight.bfloat16())


def test_products_and_rows_are_near_those_of_the_plain_form(library):
    weight, x, bias = draw(96, 80), draw(9, 80, seed=1), draw(96, seed=2)
    placed, plain = Placed(Matrices(library), weight), Placed(dense.Matrices(), weight)
    torch.testing.assert_close(placed.multiply(x, bias), plain.multiply(x, bias), rtol=2**-7, atol=2**-6)
    tokens = torch.tensor([[3, 95, 0]])[0]
    assert placed.look_up(tokens).equal(plain.look_up(tokens))
