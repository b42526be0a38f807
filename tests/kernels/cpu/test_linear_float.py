"""Products with float32 weights in panels, against float64."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.linear import Floats
from tests.kernels.cpu.placed import Placed, draw

# Around the rows and columns of a tile, and the inputs of a stretch of a panel (products.h).
ROWS = [1, 2, 3, 5, 6, 7, 11, 13, 18, 66, 239, 240, 241, 500]
SHAPES = [(64, 96), (1, 1), (63, 95), (65, 97), (200, 389)]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_has_the_rounding_of_float32_sums_and_a_row_the_same_bits_in_any_batch(library, outputs, inputs):
    weight, bias = draw(outputs, inputs, seed=1, dtype=torch.float32), draw(outputs, seed=2, dtype=torch.float32)
    placed = Placed(Floats(library), weight, torch.float32)
    x = draw(max(ROWS), inputs, seed=3, dtype=torch.float32)
    exact = x.double() @ weight.double().T + bias.double()
    bound = (x.double().abs() @ weight.double().abs().T + bias.double().abs()) * (inputs + 2) * 2.0**-24
    whole = placed.multiply(x, bias)
    assert ((whole.double() - exact).abs() <= bound).all()
    for rows in ROWS:
        assert placed.multiply(x[:rows], bias).equal(whole[:rows]), f"{rows} rows"
        assert placed.multiply(x[-rows:], bias).equal(whole[-rows:]), f"{rows} rows"
