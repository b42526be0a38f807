"""FlashInfer's norms, rope and activations: with the arguments passed, they give the reference's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infd.kernels.reference import dense
from tests.kernels.flashinfer.documented import Package

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def tokens() -> Any:
    pytest.importorskip("triton")
    from infd.kernels.flashinfer import tokens

    return tokens


class Other:
    """Replaces Triton's families."""

    def rms_norm(self, *_: Any) -> str:
        return "triton"

    add_rms_norm = silu_mul = gelu_tanh_mul = rms_norm

    def __call__(self, *_: Any, interleaved: bool = False) -> str:
        return "triton"


def close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(given.float(), expected.float(), rtol=2**-6, atol=1e-3)


def heads(dtype: torch.dtype, size: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of five tokens, as views of one tensor."""
    q, k, v = torch.randn(5, 4 + 2 + 2, size).to(dtype).split((4, 2, 2), 1)
    return q, k, v


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(tokens, dtype, offset):
    package = Package()
    norm, plain = tokens.Norm(package, Other()), dense.Norm()
    x, residual, weight = torch.randn(7, 96).to(dtype), torch.randn(7, 96).to(dtype), torch.randn(96).to(dtype)
    assert close(norm.rms_norm(x, weight, 1e-5, offset), plain.rms_norm(x, weight, 1e-5, offset))
    expected = plain.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, offset)
    given = norm.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert all(map(close, given, expected))
    name = "gemma_" if offset else ""
    assert package.calls == [f"{name}rmsnorm", f"{name}fused_add_rmsnorm"]


def test_heads_are_normalized_in_place(tokens):
    package = Package()
    q, k, _ = heads(torch.bfloat16)
    weight = torch.randn(64).bfloat16()
    norm = tokens.Norm(package, Other())
    for x in (q, k):
        assert close(norm.rms_norm(x, weight, 1e-6), dense.Norm().rms_norm(x, weight, 1e-6))
    assert package.calls == ["rmsnorm"] * 2
    assert norm.rms_norm(q, weight, 1e-6, 1.0) == "triton"  # FlashInfer norms heads without an offset only


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 32, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_angles(tokens, dtype, rotary, interleaved):
    package = Package()
    q, k, _ = heads(dtype)
    positions = torch.tensor([3, 0, 30, 11, 29])
    angles = torch.rand(31, rotary // 2) * 6
    table = torch.stack((angles.cos(), angles.sin()), 1)
    given = tokens.Rope(package, Other())(q, k, positions, table, interleaved=interleaved)
    expected = dense.Rope()(q, k, positions, table, interleaved=interleaved)
    assert all(map(close, given, expected))
    assert package.calls == ["apply_rope_with_cos_sin_cache"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates(tokens, name, dtype):
    package = Package()
    x = torch.randn(6, 2 * 48).to(dtype)
    assert close(getattr(tokens.Activation(package, Other()), name)(x), getattr(dense.Activation(), name)(x))
    assert package.calls == [name.replace("_mul", "_and_mul")]


def test_unsupported_cases_are_delegated_to_triton(tokens):
    package = Package()
    norm, rope, gate = (family(package, Other()) for family in (tokens.Norm, tokens.Rope, tokens.Activation))
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    assert norm.rms_norm(x, weight, 1e-6, 0.5) == "triton"
    assert norm.rms_norm(x, weight.float(), 1e-6) == "triton"
    assert norm.rms_norm(torch.randn(4, 65).bfloat16()[:, 1:], weight, 1e-6) == "triton"
    assert norm.add_rms_norm(x.view(2, 2, 64), x.view(2, 2, 64), weight, 1e-6) == "triton"
    positions, table = torch.arange(5), torch.rand(8, 2, 32)
    assert rope(*heads(torch.bfloat16, 80)[:2], positions, table) == "triton"
    assert rope(*heads(torch.bfloat16)[:2], positions, table[:, :, :4].contiguous()) == "triton"
    assert gate.silu_mul(torch.randn(3, 100).bfloat16()[:, :64]) == "triton"
    assert gate.gelu_tanh_mul(torch.randn(3, 10).bfloat16()) == "triton"
    assert not package.calls
    told = "weights with 0.5 added to them; norms of bfloat16 by float32; norms of unaligned rows; sums of heads"
    assert norm.refused == {"flashinfer": f"delegates to triton: {told}"}
    assert rope.refused == {"flashinfer": "delegates to triton: heads of 80; angles of 8 numbers"}
    assert gate.refused == {"flashinfer": "delegates to triton: unaligned gates"}


@pytest.mark.filterwarnings("default")  # FlashInfer's own warnings
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_flashinfer_equals_the_reference(gpu, tokens, dtype):
    x, residual, weight = (torch.randn(*shape).to("cuda", dtype) for shape in ((9, 512), (9, 512), (512,)))
    norm, plain = tokens.Norm(), dense.Norm()
    for offset in (0.0, 1.0):
        assert close(norm.rms_norm(x, weight, 1e-5, offset), plain.rms_norm(x, weight, 1e-5, offset))
        expected = plain.add_rms_norm(x, residual, weight, 1e-5, offset)
        assert all(map(close, norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, offset), expected))
    for name in ("silu_mul", "gelu_tanh_mul"):
        assert close(getattr(tokens.Activation(), name)(x), getattr(dense.Activation(), name)(x))
    q, k, _ = (each.to("cuda") for each in heads(dtype))
    q, k, _ = torch.cat((q, k, k), 1).split((4, 2, 2), 1)
    positions, angles = torch.arange(5, device="cuda"), torch.rand(31, 32, device="cuda") * 6
    table = torch.stack((angles.cos(), angles.sin()), 1)
    for interleaved in (False, True):
        given = tokens.Rope()(q, k, positions, table, interleaved=interleaved)
        assert all(map(close, given, dense.Rope()(q, k, positions, table, interleaved=interleaved)))
