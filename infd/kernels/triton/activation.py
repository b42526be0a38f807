"""Gated activations on a GPU: SiLU and tanh GELU, both computed as the gate times a sigmoid."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from infd.kernels.router import Gating

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
SILU, GELU_TANH = Gating(), Gating(activation="gelu_pytorch_tanh")


@triton.jit
def gated(
    value,
    up,
    TANH: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Return activation(value) * (up + OFFSET), all float32; see `recipe.Gating`. NaN stays NaN."""
    if LIMITED:
        value = tl.where(value > LIMIT, LIMIT, value)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    steep = value * ALPHA
    if TANH:  # (1 + tanh(y)) / 2 is sigmoid(2 y); gelu has y = sqrt(2 / pi) (x + 0.044715 x^3)
        steep = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    return value / (1.0 + tl.exp(-steep)) * (up + OFFSET)


@triton.jit
def gate(
    x,
    out,
    x_row,
    SIZE: tl.constexpr,
    TANH: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gated activation of x[:, :SIZE] and x[:, SIZE:] to out [T, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x += row * x_row + column
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + SIZE, mask=inside, other=0.0).to(tl.float32)
    result = gated(value, up, TANH, ALPHA, LIMITED, LIMIT, OFFSET)
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


class Activation:
    """Implements families.activation.Activation."""

    def silu_mul(self, x: Tensor) -> Tensor:
        return activate(x, SILU, x.dtype)

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        return activate(x, GELU_TANH, x.dtype)


def activate(x: Tensor, gating: Gating, dtype: torch.dtype) -> Tensor:
    """Return the gated activation [T, I] of x [T, 2 I], gate and up side by side, in `dtype`."""
    rows, size = x.shape[0], x.shape[1] // 2
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, size), dtype=dtype, device=x.device)
    gate[rows, triton.cdiv(size, BLOCK)](x, out, x.stride(0), SIZE=size, **constants(gating), BLOCK=BLOCK)
    return out


def constants(gating: Gating) -> dict[str, Any]:
    """Return the constants of `gated`."""
    limited = gating.limit != inf
    return {
        "TANH": gating.activation != "silu",
        "ALPHA": float(gating.alpha),
        "LIMITED": limited,
        "LIMIT": float(gating.limit) if limited else 0.0,
        "OFFSET": float(gating.offset),
    }
