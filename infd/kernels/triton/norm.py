"""RMSNorm on a GPU, optionally fused with the preceding residual addition: one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.families.norm import Norm as NormFamily

if TYPE_CHECKING:
    from torch import Tensor

TILE = 1024  # fewest elements per program; a program norms several short rows


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    x,
    residual,
    weight,
    normed,
    stream,
    rows,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    offset,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm rows of x or, if ADD, of x + residual, which is first rounded to the dtype of `stream` and stored there.

    x, residual     [rows / INNER, INNER, SIZE], with strides
    normed, stream  [rows / INNER, INNER, SIZE], contiguous
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    within = (row < rows)[:, None] & (column < SIZE)[None, :]
    outer = (row // INNER)[:, None]
    inner = (row % INNER)[:, None]
    place = row[:, None] * SIZE + column[None, :]
    value = tl.load(x + outer * x_outer + inner * x_inner + column[None, :], mask=within, other=0.0).to(tl.float32)
    if ADD:
        at = outer * residual_outer + inner * residual_inner + column[None, :]
        value += tl.load(residual + at, mask=within, other=0.0).to(tl.float32)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + place, rounded, mask=within)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, 1) / SIZE
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32) + offset
    value = value * tl.rsqrt(mean + eps)[:, None] * scale[None, :]
    tl.store(normed + place, value.to(normed.dtype.element_ty), mask=within)


class Norm(NormFamily):
    """Implements families.norm.Norm."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return _launch(x, None, weight, eps, offset)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        return _launch(x, residual, weight, eps, offset)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return (normed rows, stream); without a residual, the normed rows twice."""
    size = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = normed if residual is None else torch.empty_like(normed)
    x = _in_rows(x)
    other = x if residual is None else _in_rows(residual)
    block = triton.next_power_of_2(size)
    rows, many = x.shape[0] * x.shape[1], max(1, TILE // block)
    rms_norm[(triton.cdiv(rows, many),)](
        x,
        other,
        weight,
        normed,
        stream,
        rows,
        x.stride(0),
        x.stride(1),
        other.stride(0),
        other.stride(1),
        eps,
        offset,
        SIZE=size,
        INNER=x.shape[1],
        ADD=residual is not None,
        BLOCK_ROWS=many,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return normed, stream


def _in_rows(x: Tensor) -> Tensor:
    """Return x as [outer, inner, size] with contiguous rows; a copy only if rows are strided or x has over 3 axes."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous().view(-1, x.shape[-1])
    return x if x.dim() == 3 else x.view(-1, 1, x.shape[-1])
