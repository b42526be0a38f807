"""Products with int8 weights, against integers in float64, the reference, and the unquantized product."""

from __future__ import annotations

import pytest
import torch

from infd.groups import GroupedRows
from infd.input_scheme import InputScheme
from infd.kernels.cpu.inputs import Inputs
from infd.kernels.cpu.linear import Int8
from infd.kernels.families.inputs import Rounding
from infd.kernels.reference import int8 as reference
from tests.kernels.cpu.placed import Kept, Placed, draw

SHAPES = [(64, 64), (1, 1), (63, 2), (65, 7), (200, 129), (130, 2050), (66, 4399)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 31, 241]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_native_quantization_equals_the_plain_forms_to_the_bit(library, outputs, inputs, dtype):
    weight = draw(outputs, inputs, seed=1, dtype=dtype)
    placed, meant = Placed(Int8(library), weight, dtype), Placed(reference.Matrices(), weight, dtype)
    for rows in ROWS:
        x = draw(rows, inputs, seed=rows, dtype=dtype)
        wide = placed.multiply(x, wide=True)
        assert wide.dtype is torch.float32
        assert wide.equal(meant.multiply(x, wide=True)), f"{rows} rows"
        assert placed.multiply(x).equal(wide.to(dtype)), f"{rows} rows"
    tokens = torch.arange(outputs).flip(0).repeat(2)
    looked_up = placed.look_up(tokens)
    assert looked_up.dtype is dtype
    assert looked_up.equal(meant.look_up(tokens))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_product_is_one_of_whole_numbers_with_their_scales(outputs, inputs):
    weight, x, bias = draw(outputs, inputs, seed=1), draw(9, inputs), draw(outputs, seed=2)
    for rows in (weight, x):
        numbers, scales = reference.quantize(rows)
        assert numbers.abs().amax(1).eq(127).all()
        steps = rows.double() / (rows.double().abs().amax(1, keepdim=True) / 127)
        assert (numbers - steps).abs().max() < 0.5001  # a number halfway between two integers may round either way
        torch.testing.assert_close(numbers * scales, rows.float(), rtol=0, atol=0.501 * scales.max().item())
    (w, weight_scales), (numbers, scales) = reference.quantize(weight), reference.quantize(x)
    exact = (numbers.double() @ w.double().T) * scales.double() * weight_scales.double().T + bias.double()
    product = Placed(reference.Matrices(), weight).multiply(x, bias, wide=True)
    torch.testing.assert_close(product.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("outputs", "inputs"), [(130, 2050), (66, 4399)])
def test_a_product_is_near_the_one_without_quantization(library, outputs, inputs):
    # Both factors have uniform rounding errors of at most half a scale: 1 / sqrt(12) of a scale.
    weight, x = draw(outputs, inputs, seed=1), draw(64, inputs)
    off = Placed(Int8(library), weight).multiply(x, wide=True).double() - x.double() @ weight.double().T
    spread = (x.abs().amax(1).double().mean() + weight.abs().amax(1).double().mean()) / 127 / 12**0.5
    assert off.square().mean().sqrt() < 1.1 * spread * inputs**0.5


def test_the_largest_sums_fit(library):
    x = torch.ones(3, 100_000).bfloat16()
    x[1] = -1
    expected = torch.tensor([100_000.0, -100_000.0, 100_000.0])[:, None].expand(3, 64)
    product = Placed(Int8(library), torch.ones(64, 100_000).bfloat16()).multiply(x, wide=True)
    torch.testing.assert_close(product, expected, rtol=1e-6, atol=0)


def test_numbers_at_both_ends_are_kept(library):
    # The sum of two products 127 * 127 exceeds 16 bits; -1 and 1 reveal wrong signs.
    weight = torch.tensor([[1.0, -1.0] * 33, [-1.0, 1.0] * 33])
    product = Placed(Int8(library), weight, torch.float32).multiply(weight)
    torch.testing.assert_close(product, torch.tensor([[66.0, -66.0], [-66.0, 66.0]]), rtol=1e-6, atol=0)


def test_memory_that_was_never_filled_is_a_matrix_of_zeros(library):
    form = Int8(library).form(70, 66, torch.bfloat16)
    kept = torch.zeros(form.shape, dtype=form.dtype)
    assert not form.multiply(draw(9, 66), kept).any()
    assert not form.look_up(torch.arange(70), kept).any()


def test_rows_of_zeros_give_zeros(library):
    weight = draw(70, 66)
    weight[3] = 0
    x = draw(4, 66)
    x[2], x[3] = 0, 1e-35
    product = Placed(Int8(library), weight).multiply(x)
    assert not product[2:].any()
    assert not product[:, 3].any()
    assert product[0, :3].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_weights_of_any_dtype_are_quantized_like_the_reference(library, dtype):
    weight, x = torch.randn(70, 66).to(dtype), draw(9, 66)
    assert Placed(Int8(library), weight).multiply(x).equal(Placed(reference.Matrices(), weight).multiply(x))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_integers_of_a_checkpoint_are_kept_with_their_scales(library, outputs, inputs):
    integers = torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    integers[0], integers[-1, ::2] = -128, 127  # the largest sums
    scales = torch.rand(outputs, 1, generator=torch.Generator().manual_seed(4))
    placed = Kept(Int8(library), integers, scales, torch.float32)
    meant = Kept(reference.Matrices(), integers, scales, torch.float32)
    assert placed.look_up(torch.arange(outputs)).equal(integers * scales)
    for rows in ROWS:
        x = draw(rows, inputs, seed=rows, dtype=torch.float32)
        x[0] = 1
        assert placed.multiply(x).equal(meant.multiply(x)), f"{rows} rows"


@pytest.mark.parametrize("zero", [None, -128.0, 0.0, 5.0, 127.0])
def test_inputs_with_a_stored_scale_are_its_integers_minus_its_zero_point(library, zero):
    generator = torch.Generator().manual_seed(3)
    integers = torch.randint(-128, 128, (70, 131), generator=generator).to(torch.int8)
    scales, scale = torch.rand(70, 1, generator=generator) + 0.1, torch.tensor([0.04])
    point = None if zero is None else torch.tensor([zero])
    scheme = InputScheme("int8", static=True, zeros=zero is not None)
    found = Int8(library).form(70, 131, torch.float32)
    form = found.stored(Rounding(Inputs(library), scheme, scale, point))
    assert not isinstance(form, str)
    storage = torch.zeros(form.shape, dtype=form.dtype)
    form.place_groups(storage, 0, GroupedRows(integers, scales))

    for rows in (1, 2, 3, 7, 31):
        x = torch.randn(rows, 131, generator=generator) * 3  # beyond the range too
        counted = ((x / scale + (zero or 0)).round().clamp(-128, 127) - (zero or 0)).double()
        exact = counted @ integers.double().T * scale.double() * scales.double().T
        torch.testing.assert_close(form.multiply(x, storage).double(), exact, rtol=1e-5, atol=1e-5)
        x[0, 7] = torch.nan
        product = form.multiply(x, storage)
        assert product[0].isnan().all()
        assert product[1:].isfinite().all()
