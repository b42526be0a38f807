"""The families that look at one token at a time, by FlashInfer's kernels where they take what they are given.

They load 16 bytes at once. What lies otherwise goes to Triton, as do norms to whose weights something other than 1 is
added, and angles of heads whose size or halves are others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels import ops
from infd.kernels.flashinfer.fits import HEADS, LOADED, loadable
from infd.kernels.triton import activation, norm, rope

if TYPE_CHECKING:
    from torch import Tensor


class Norm:
    """The norm family."""

    def __init__(self, package: Any = None, other: ops.Norm | None = None) -> None:
        package = package or import_module("flashinfer")
        self._norm = {0.0: package.rmsnorm, 1.0: package.gemma_rmsnorm}
        self._add = {0.0: package.fused_add_rmsnorm, 1.0: package.gemma_fused_add_rmsnorm}
        self._other = other or norm.Norm()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        axes = (2, 3) if offset == 0.0 else (2,)  # its kernel for heads knows no other weights
        if offset not in self._norm or x.dim() not in axes or weight.dtype != x.dtype or not loadable(x):
            return self._other.rms_norm(x, weight, eps, offset)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm[offset](x, weight, eps, out=out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        plain = x.dim() == 2 and x.dtype == residual.dtype == weight.dtype
        if offset not in self._add or not plain or not loadable(x, residual):
            return self._other.add_rms_norm(x, residual, weight, eps, offset)
        self._add[offset](x, residual, weight, eps)  # in their places
        return x, residual


class Rope(ops.Rope):
    """The rope family. Entering the cache is another launch, where Triton's does both in one."""

    def __init__(self, package: Any = None, other: ops.Rope | None = None) -> None:
        self._turn = (package or import_module("flashinfer")).apply_rope_with_cos_sin_cache
        self._other = other or rope.Rope()

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        size, half = q.shape[2], table.shape[2]
        whole = half * q.itemsize % LOADED == 0  # no load goes beyond a half
        if size not in HEADS or not whole or q.stride(1) != size or k.stride(1) != size or not loadable(q, k):
            return self._other(q, k, positions, table, interleaved=interleaved)
        turned = self._turn(positions, q.flatten(1), k.flatten(1), size, table.flatten(1), not interleaved)
        return turned[0].view(q.shape), turned[1].view(k.shape)


class Activation:
    """The activation family."""

    def __init__(self, package: Any = None, other: ops.Activation | None = None) -> None:
        package = package or import_module("flashinfer")
        self._silu, self._gelu_tanh = package.silu_and_mul, package.gelu_tanh_and_mul
        self._other = other or activation.Activation()

    def silu_mul(self, x: Tensor) -> Tensor:
        return self._gate(self._silu, x) if _in_one(x) else self._other.silu_mul(x)

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        return self._gate(self._gelu_tanh, x) if _in_one(x) else self._other.gelu_tanh_mul(x)

    def _gate(self, activate: Any, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
        activate(x, out=out)
        return out


def _in_one(x: Tensor) -> bool:
    """Say whether its kernels for gates take x [T, 2n]: they ask for no strides."""
    return x.is_contiguous() and loadable(x)
