"""Norm, rope and activations on a GPU, against the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from infd.kernels.families.attention import KeyValuePages
from infd.kernels.recipe import NormRecipe
from infd.kernels.reference import dense
from infd.kernels.reference.attention import PagedAttention
from tests.kernels.attention_case import bits
from tests.kernels.paging import PagedSpan, attention_batch
from tests.kernels.values import draw

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
    """Compare within two roundings to `dtype`: the reference rounds intermediate results, a fused kernel does not."""
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
    assert given[2].cpu().equal(expected[2])  # the stream is equal to the bit


def test_heads_may_be_normalized_in_a_fused_product(norm, device):
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


@pytest.mark.parametrize(
    ("dtype", "held"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.float8_e4m3fn)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head", "pairs"), [(4, 2, 16, 8), (3, 1, 11, 3)])
def test_keys_enter_the_cache_as_they_are_turned_and_values_as_they_are(
    rope, device, unsynchronised, dtype, held, heads, kv_heads, head, pairs
):
    angles = 3 * draw(9, pairs)
    table = torch.stack((angles.cos(), angles.sin()), 1)
    positions, slots = torch.tensor([8, 0, 3]), torch.tensor([14, 3, 0])
    fused = draw(3, heads + 2 * kv_heads, head).to(dtype)
    batch = attention_batch([PagedSpan(0, 3, [0])], page_tokens=5)
    scales = None if held is None else torch.tensor([[0.03, 0.5], [0.004, 0.7]])[:, :kv_heads].contiguous()

    def pages(where: torch.device) -> KeyValuePages:
        shape = (3, kv_heads, 5, head)
        cache = (torch.zeros(shape, dtype=held or dtype, device=where) for _ in range(2))
        return KeyValuePages(*cache, None if scales is None else scales.to(where))

    expected, given = pages(torch.device("cpu")), pages(device)
    split = (heads, kv_heads, kv_heads)
    plain = PagedAttention().prepare(replace(batch, slots=slots))
    q = dense.Rope().enter(*fused.split(split, 1), positions, table, plain, expected)
    plan = SimpleNamespace(slots=slots.to(device))
    moved = fused.to(device).split(split, 1), positions.to(device), table.to(device)
    with unsynchronised():
        turned = rope.enter(*moved[0], *moved[1:], plan, given)
    same([turned], [q], dtype)
    if held is None:
        same(given[:2], expected[:2], dtype)
        return
    for one, other in zip(given[:2], expected[:2], strict=True):
        # A number near the middle of two fp8 values may round either way, since sums differ in their last bits.
        assert (one.cpu().float() - other.float()).abs().le(other.float().abs() / 8).all()
        assert bits(one).cpu().eq(bits(other)).float().mean() > 0.98


class HeadNorm:
    """Implements families.norm.HeadNorm: over all of a token's heads if the weight has H * D numbers."""

    def __init__(self, norm, weight, eps, offset):
        self._norm, self._recipe = norm, NormRecipe(weight, eps, offset)

    def __call__(self, x):
        weight, eps, offset = self._recipe.weight, self._recipe.eps, self._recipe.offset
        return self._norm.rms_norm(x if weight.numel() == x.shape[2] else x.flatten(1), weight, eps, offset).view(
            x.shape
        )

    def recipe(self):
        return self._recipe


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head", "pairs", "interleaved"), [(16, 8, False), (11, 3, True)])
@pytest.mark.parametrize("asked", ["each head", "all heads", "unlike", "keys alone"])
def test_heads_are_normed_before_they_turn(rope, norm, device, unsynchronised, dtype, head, pairs, interleaved, asked):
    heads, kv_heads = 4, 2
    angles = 3 * draw(9, pairs)
    table = torch.stack((angles.cos(), angles.sin()), 1)
    positions, slots = torch.tensor([8, 0, 3]), torch.tensor([14, 3, 0])
    fused = draw(3, heads + 2 * kv_heads, head).to(dtype)
    batch = attention_batch([PagedSpan(0, 3, [0])], page_tokens=5)
    sizes = (heads * head, kv_heads * head) if asked == "all heads" else (head, head)
    weights = [draw(size, seed=size).to(dtype) for size in sizes]

    def norms(family, where):
        one, other = (each.to(where) for each in weights)
        first = HeadNorm(family, one, 1e-5, 1.0)
        second = HeadNorm(family, other, 1e-2 if asked == "unlike" else 1e-5, 1.0)
        return {"q_norm": None if asked == "keys alone" else first, "k_norm": second}

    def pages(where):
        return KeyValuePages(*(torch.zeros(3, kv_heads, 5, head, dtype=dtype, device=where) for _ in range(2)))

    cpu, split = torch.device("cpu"), (heads, kv_heads, kv_heads)
    expected, given = pages(cpu), pages(device)
    plain = PagedAttention().prepare(replace(batch, slots=slots))
    parts = fused.split(split, 1)
    named = {"interleaved": interleaved}
    q = dense.Rope().enter(*parts, positions, table, plain, expected, **named, **norms(dense.Norm(), cpu))
    plan = SimpleNamespace(slots=slots.to(device))
    moved = (*fused.to(device).split(split, 1), positions.to(device), table.to(device))
    asking = norms(norm, device)
    with unsynchronised():
        turned = rope.enter(*moved, plan, given, **named, **asking)
    same([turned, *given[:2]], [q, *expected[:2]], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_are_those_of_the_reference(activation, device, unsynchronised, dtype, name):
    x = 4 * draw(2, 2060).to(dtype)
    expected = getattr(dense.Activation(), name)(x)
    x = x.to(device)
    with unsynchronised():
        given = getattr(activation, name)(x)
    same([given], [expected], dtype)
