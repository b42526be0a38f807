"""Gated activations on a GPU: SiLU and tanh GELU, both computed as the gate times a sigmoid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024


@triton.jit
def gate(x, out, x_row, SIZE: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """Write activation(x[:, :SIZE]) * x[:, SIZE:] to out [T, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x += row * x_row + column
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + SIZE, mask=inside, other=0.0).to(tl.float32)
    steep = value
    if TANH:  # (1 + tanh(y)) / 2 is sigmoid(2 y); gelu has y = sqrt(2 / pi) (x + 0.044715 x^3)
        steep = 1.5957691216057308 * (value + 0.044715 * value * value * value)
    result = value / (1.0 + tl.exp(-steep)) * up
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


class Activation:
    """Implements families.activation.Activation."""

    def silu_mul(self, x: Tensor) -> Tensor:
        return _launch(x, tanh=False)

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        return _launch(x, tanh=True)


def _launch(x: Tensor, *, tanh: bool) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    gate[rows, triton.cdiv(size, BLOCK)](x, out, x.stride(0), SIZE=size, TANH=tanh, BLOCK=BLOCK)
    return out
