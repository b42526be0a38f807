"""Native norm, rope and activations against the reference: float32 within rounding, bfloat16 within one ulp."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.cpu import tokens
from infd.kernels.reference import dense
from tests.kernels.values import draw

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SIZES = pytest.mark.parametrize("size", [1, 2, 7, 8, 16, 30, 64, 80, 128, 1000, 1024])


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare; bfloat16 may round to either neighbour."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    half = ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2**-7 if half else 2e-6, atol=1e-6)


@BOTH
@SIZES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(library, dtype, size, offset):
    x, weight = draw(5, size, dtype=dtype) * 3, draw(size, seed=1, dtype=dtype)
    close(tokens.Norm(library).rms_norm(x, weight, 1e-5, offset), dense.Norm().rms_norm(x, weight, 1e-5, offset))


@BOTH
def test_rms_norm_of_strided_heads(library, dtype):
    among = draw(5, 9, 64, dtype=dtype)
    weight = draw(64, seed=1, dtype=dtype)
    x = among[:, 2:6]
    close(tokens.Norm(library).rms_norm(x, weight, 1e-6), dense.Norm().rms_norm(x, weight, 1e-6))


@BOTH
@SIZES
def test_add_rms_norm(library, dtype, size):
    x, residual, weight = (
        draw(5, size, dtype=dtype),
        draw(5, size, seed=1, dtype=dtype),
        draw(size, seed=2, dtype=dtype),
    )
    ours, stream = tokens.Norm(library).add_rms_norm(x, residual, weight, 1e-6)
    theirs, expected = dense.Norm().add_rms_norm(x, residual, weight, 1e-6)
    assert stream.equal(expected)
    close(ours, theirs)


@BOTH
@SIZES
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(library, dtype, size, biased):
    x, weight = draw(5, size, dtype=dtype) * 3 + 1, draw(size, seed=1, dtype=dtype)
    bias = draw(size, seed=2, dtype=dtype) if biased else None
    exact = (each if each is None else each.double() for each in (x, weight, bias))  # torch rounds x - mean with size 1
    close(tokens.Norm(library).layer_norm(x, weight, bias, 1e-5), dense.Norm().layer_norm(*exact, 1e-5).to(dtype))


@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("size", "turned"), [(2, 2), (8, 8), (24, 24), (64, 64), (64, 32), (80, 20), (128, 128), (7, 4)]
)
def test_rope(library, dtype, interleaved, size, turned):
    angles = draw(50, turned // 2, seed=3) * 9
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    heads = draw(6, 5, size, dtype=dtype)
    q, k = heads[:, :3], heads[:, 3:]
    positions = torch.tensor([49, 0, 3, 3, 17, 1])
    ours = tokens.Rope(library)(q, k, positions, table, interleaved=interleaved)
    theirs = dense.Rope()(q, k, positions, table, interleaved=interleaved)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other)


@BOTH
@SIZES
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates(library, dtype, size, name):
    x = torch.cat((draw(5, size) * 6, draw(5, size, seed=1)), dim=1).to(dtype)
    ours, theirs = (getattr(family, name)(x.clone()) for family in (tokens.Activation(library), dense.Activation()))
    # The reference rounds the activation before the multiplication.
    torch.testing.assert_close(ours, theirs, rtol=2**-6 if dtype is torch.bfloat16 else 4e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_at_large_magnitudes(library, name):
    gate = torch.tensor([[-1e30, -1000.0, -90.0, 0.0, 90.0, 1000.0, 1e30, -20.0]])
    ours = getattr(tokens.Activation(library), name)(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(ours, gate.clamp(min=0), rtol=1e-6, atol=1e-7)


@BOTH
def test_a_nan_stays_a_nan(library, dtype):
    x = draw(3, 64, dtype=dtype)
    x[1, 5] = torch.nan
    weight = torch.ones(64, dtype=dtype)
    norm, activation = tokens.Norm(library), tokens.Activation(library)
    for out in (norm.rms_norm(x, weight, 1e-6), *norm.add_rms_norm(x, x, weight, 1e-6)):
        assert out.isfinite().all(1).tolist() == [True, False, True]
    for gated in (activation.silu_mul(x), activation.gelu_tanh_mul(x)):
        assert gated.isfinite().all(1).tolist() == [True, False, True]


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even(library):
    numbers = torch.cat((torch.randn(4096), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 65280.0, 3.39e38, -0.0])))
    x = numbers.bfloat16()
    residual = (numbers * 2**-8).bfloat16()
    _, stream = tokens.Norm(library).add_rms_norm(x[None], residual[None], torch.ones_like(x), 1e-6)
    assert stream[0].equal((x.float() + residual.float()).bfloat16())
