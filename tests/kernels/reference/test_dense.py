"""Norm, rope, activation, linear and embedding, against their definitions."""

from __future__ import annotations

import pytest
import torch

from infd.kernels.reference import dense
from tests.kernels.values import draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_computed_in_float32_and_rounded_once(dtype):
    x, weight = draw(5, 64).to(dtype) * 3, draw(64, seed=1).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(dense.Norm().rms_norm(x, weight, 1e-5), exact.to(dtype), rtol=1e-6, atol=1e-6)


def test_add_rms_norm_returns_the_sum_and_its_norm():
    x, residual, weight = draw(5, 8), draw(5, 8, seed=1), draw(8, seed=2)
    normed, stream = dense.Norm().add_rms_norm(x, residual, weight, 1e-6)
    assert stream.equal(x + residual)
    assert normed.equal(dense.Norm().rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offset_is_added_to_the_weight_before_anything_is_rounded(dtype):
    x, residual, weight = draw(5, 64).to(dtype), draw(5, 64, seed=1).to(dtype), draw(64, seed=2).to(dtype) / 500
    normed, stream = dense.Norm().add_rms_norm(x, residual, weight, 1e-5, 1.0)
    summed = stream.double()
    exact = summed / (summed.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1)
    torch.testing.assert_close(normed, exact.to(dtype), rtol=1e-6, atol=1e-6)


def test_rope_turns_each_pair_by_the_angle_of_its_position():
    angles = torch.tensor([[0.0, 0.0], [0.5, 0.1], [1.0, 0.2]])
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([2, 0, 1])
    q, k = draw(3, 4, 4), draw(3, 2, 4, seed=1)
    for x, turned in zip((q, k), dense.Rope()(q, k, positions, table), strict=True):
        pairs = torch.complex(x[..., :2], x[..., 2:])
        expected = pairs * torch.polar(torch.ones(3, 1, 2), angles[positions, None])
        torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


def test_rope_turns_only_the_part_that_the_table_covers():
    table = torch.rand(3, 2, 2)
    positions = torch.tensor([2, 0, 1])
    q, k = draw(3, 4, 7), draw(3, 2, 7, seed=1)
    for x, turned in zip((q, k), dense.Rope()(q, k, positions, table), strict=True):
        assert turned[..., 4:].equal(x[..., 4:])
    (alone, _), (turned, _) = dense.Rope()(q[..., :4], k, positions, table), dense.Rope()(q, k, positions, table)
    assert turned[..., :4].equal(alone)


def test_interleaved_rope_pairs_neighbours():
    table = torch.rand(3, 2, 2)
    positions = torch.tensor([2, 0, 1])
    q, k = draw(3, 4, 5), draw(3, 2, 5, seed=1)
    apart = torch.tensor([0, 2, 1, 3, 4])  # reorders neighbouring pairs into the pairs of the other style
    halves = dense.Rope()(q[..., apart], k[..., apart], positions, table)
    for turned, expected in zip(dense.Rope()(q, k, positions, table, interleaved=True), halves, strict=True):
        assert turned[..., apart].equal(expected)


def test_rope_keeps_the_dtype():
    table = torch.zeros(4, 2, 2)
    q, k = dense.Rope()(draw(1, 2, 4).bfloat16(), draw(1, 1, 4).bfloat16(), torch.tensor([1]), table)
    assert (q.dtype, k.dtype) == (torch.bfloat16, torch.bfloat16)


def test_silu_mul_gates_the_second_half_with_the_first():
    x = draw(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    kept = x.clone()
    torch.testing.assert_close(dense.Activation().silu_mul(x), gate * gate.sigmoid() * up)
    assert x.equal(kept)


def test_gelu_tanh_mul_gates_the_second_half_with_the_first():
    x = draw(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    kept = x.clone()
    gelu = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(dense.Activation().gelu_tanh_mul(x), gelu * up)
    assert x.equal(kept)


def test_linear_multiplies_by_the_transposed_weight_and_adds_the_bias():
    x, weight, bias = draw(3, 4), draw(5, 4, seed=1), draw(5, seed=2)
    form = dense.Plain((5, 4), x.dtype)
    torch.testing.assert_close(form.multiply(x, weight, bias), x @ weight.T + bias)
    assert form.multiply(x.bfloat16(), weight.bfloat16(), wide=True).dtype is dense.Plain((5, 4), torch.bfloat16).wide


def test_embedding_returns_rows():
    weight = draw(6, 4)
    assert dense.Plain((6, 4), weight.dtype).look_up(torch.tensor([5, 0, 5]), weight).equal(weight[[5, 0, 5]])
