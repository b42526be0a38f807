"""The families that look at one token at a time, on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.reference import dense
from tests.kernels.test_dense import draw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def norm(device):
    from infd.kernels.triton.norm import Norm

    return Norm()


@pytest.fixture
def rope(device):
    from infd.kernels.triton.rope import Rope

    return Rope()


@pytest.fixture
def activation(device):
    from infd.kernels.triton.activation import Activation

    return Activation()


def same(given, expected, dtype):
    """Compare within two roundings to `dtype`: the reference rounds where a fused kernel does not."""
    tolerance = 2 * torch.finfo(dtype).eps if dtype is not torch.float32 else 2e-6
    for one, other in zip(given, expected, strict=True):
        assert one.dtype is dtype
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 2, 24), (2, 1100)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_are_those_of_the_reference(norm, device, unsynchronised, dtype, shape, offset):
    x, residual = (3 * draw(*shape, seed=seed).to(dtype) for seed in (0, 1))
    weight = draw(shape[-1], seed=2).to(dtype)
    reference = dense.Norm()
    expected = [
        reference.rms_norm(x, weight, 1e-5, offset),
        *reference.add_rms_norm(x, residual, weight, 1e-5, offset),
    ]
    x, residual, weight = (each.to(device) for each in (x, residual, weight))
    with unsynchronised():
        given = [norm.rms_norm(x, weight, 1e-5, offset), *norm.add_rms_norm(x, residual, weight, 1e-5, offset)]
    same(given, expected, dtype)
    assert given[2].cpu().equal(expected[2])  # the stream is rounded as the reference rounds it


def test_heads_may_be_normed_where_they_stand_in_a_fused_product(norm, device):
    fused = draw(3, 6, 16)
    part, weight = fused[:, 2:5], draw(16, seed=1)
    expected = dense.Norm().rms_norm(part, weight, 1e-6)
    same([norm.rms_norm(fused.to(device)[:, 2:5], weight.to(device), 1e-6)], [expected], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head", "pairs"), [(4, 2, 16, 8), (3, 1, 11, 3)])
def test_rotations_are_those_of_the_reference(
    rope, device, unsynchronised, dtype, interleaved, heads, kv_heads, head, pairs
):
    angles = 3 * draw(9, pairs)
    table = torch.stack((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([8, 0, 3])
    fused = draw(3, heads + kv_heads, head).to(dtype)
    expected = dense.Rope()(*fused.split((heads, kv_heads), 1), positions, table, interleaved=interleaved)
    q, k = fused.to(device).split((heads, kv_heads), 1)
    positions, table = positions.to(device), table.to(device)
    with unsynchronised():
        given = rope(q, k, positions, table, interleaved=interleaved)
    same(given, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_are_those_of_the_reference(activation, device, unsynchronised, dtype, name):
    x = 4 * draw(2, 2060).to(dtype)
    expected = getattr(dense.Activation(), name)(x)
    x = x.to(device)
    with unsynchronised():
        given = getattr(activation, name)(x)
    same([given], [expected], dtype)
