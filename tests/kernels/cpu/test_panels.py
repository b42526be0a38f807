"""Properties of weights in panels of every kind."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu.groups import Int4
from infd.kernels.cpu.linear import Compressed, Int8, Matrices
from tests.kernels.cpu.placed import Placed, draw

ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 260]


@pytest.fixture(params=[Matrices, Compressed, Int8, Int4])
def matrices(request, library):
    if request.param is Compressed and library.isa not in ("amx", "avx512_bf16"):
        pytest.skip("compressed matrices need AVX512-BF16")
    return request.param(library)


@pytest.mark.parametrize(("outputs", "inputs"), [(200, 129), (66, 4399), (260, 4399)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_bit_identical_in_any_batch(matrices, outputs, inputs, threads):
    weight = Placed(matrices, draw(outputs, inputs, seed=1))
    x = draw(max(ROWS), inputs)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = weight.multiply(x[:33])
    torch.set_num_threads(threads)
    try:
        together = weight.multiply(x)
        assert together[:33].equal(alone)
        for rows in ROWS:
            assert weight.multiply(x[:rows]).equal(together[:rows])
            assert weight.multiply(x[-rows:]).equal(together[-rows:])
    finally:
        torch.set_num_threads(before)
    assert torch.cat([weight.multiply(x[i : i + 1]) for i in range(20)]).equal(together[:20])


def test_rows_may_be_strided(matrices):
    weight, x = Placed(matrices, draw(70, 66)), draw(5, 200)
    assert weight.multiply(x[:, 3:69]).equal(weight.multiply(x[:, 3:69].contiguous()))
    assert weight.multiply(x.T[:66, :3].T).equal(weight.multiply(x.T[:66, :3].T.contiguous()))


def test_no_rows_give_no_rows(matrices):
    assert Placed(matrices, draw(70, 66)).multiply(draw(0, 66)).shape == (0, 70)


@pytest.mark.parametrize("cuts", [(0, 1, 64, 65, 200), (0, 63, 129, 130, 199, 200), (0, 100, 200)])
def test_rows_are_placed_in_parts_that_begin_anywhere(matrices, cuts):
    whole, parts = (Placed(matrices, draw(200, 67), cuts=each) for each in (None, cuts))
    tokens, x = torch.arange(200), draw(9, 67, seed=1)
    assert parts.look_up(tokens).equal(whole.look_up(tokens))
    assert parts.multiply(x).equal(whole.multiply(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_weights_may_come_in_any_type(matrices, dtype):
    # The weights are exact in every dtype used, so no conversion rounds.
    weight, x = draw(70, 66), draw(9, 66)
    expected = Placed(matrices, weight.half().bfloat16())
    assert Placed(matrices, weight.half().bfloat16().to(dtype)).multiply(x).equal(expected.multiply(x))


def test_a_row_out_of_range_is_nan(matrices):
    looked_up = Placed(matrices, draw(70, 66)).look_up(torch.tensor([1, 70, -1]))
    assert looked_up.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize("place", [0, 7, 65])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_value_that_is_not_finite_affects_only_its_own_row(matrices, place, bad):
    weight, x = draw(70, 66), draw(9, 66)
    sound = Placed(matrices, weight).multiply(x)
    x[4, place] = float(bad)
    broken = Placed(matrices, weight).multiply(x)
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert not broken[4].isfinite().any()
    assert broken[rest].equal(sound[rest])

    weight[2, place] = float(bad)
    spoilt = Placed(matrices, weight)
    broken = spoilt.multiply(x)
    assert not broken[:, 2].isfinite().any()
    assert broken[rest][:, 3:].equal(sound[rest][:, 3:])
    assert not spoilt.look_up(torch.tensor([2]))[0, place].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_before_rounding(matrices, dtype):
    if dtype is torch.float32 and isinstance(matrices, Matrices | Compressed):
        pytest.skip("bfloat16 weights are for bfloat16 activations")
    weight = Placed(matrices, draw(70, 66), dtype)
    x, bias = draw(9, 66, dtype=dtype), draw(70, seed=2, dtype=dtype)
    wide = weight.multiply(x, bias, wide=True)
    assert wide.dtype is weight.form.wide is torch.float32
    torch.testing.assert_close(wide, weight.multiply(x, wide=True) + bias.float(), rtol=1e-6, atol=1e-6)
    assert weight.multiply(x, bias).equal(wide.to(dtype))
