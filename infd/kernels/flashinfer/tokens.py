"""The elementwise families (norm, rope, activation) by FlashInfer.

FlashInfer's kernels load 16 bytes at a time. Unaligned rows, norms with an offset other than 0 and 1, rope with
unsupported sizes and other cases are delegated to Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.families.norm import Norm as NormFamily
from infd.kernels.families.rope import Rope as RopeFamily
from infd.kernels.flashinfer.delegation import Delegation
from infd.kernels.flashinfer.support import HEADS, LOADED, loadable, name
from infd.kernels.triton import activation, norm, rope

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.activation import Activation as ActivationFamily


class Norm(NormFamily):
    """Implements families.norm.Norm."""

    def __init__(self, package: Any = None, other: NormFamily | None = None) -> None:
        package = package or import_module("flashinfer")
        self._norm = {0.0: package.rmsnorm, 1.0: package.gemma_rmsnorm}
        self._add = {0.0: package.fused_add_rmsnorm, 1.0: package.gemma_fused_add_rmsnorm}
        self._other = other or norm.Norm()
        self._delegation = Delegation()
        self.refused = self._delegation.refused

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        reason = self._cannot(weight, offset, x)
        if reason is None and offset != 0.0 and x.dim() != 2:
            reason = f"norms of heads with {offset:g} added to their weights"
        if reason is not None:
            self._delegation.note(reason)
            return self._other.rms_norm(x, weight, eps, offset)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm[offset](x, weight, eps, out=out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        reason = self._cannot(weight, offset, x, residual)
        if reason is None and x.dim() != 2:
            reason = "sums of heads"
        if reason is not None:
            self._delegation.note(reason)
            return self._other.add_rms_norm(x, residual, weight, eps, offset)
        self._add[offset](x, residual, weight, eps)  # in place
        return x, residual

    def _cannot(self, weight: Tensor, offset: float, *inputs: Tensor) -> str | None:
        """Return the reason why no FlashInfer kernel supports the norm, or None."""
        if offset not in self._norm:
            return f"weights with {offset:g} added to them"
        if any(x.dtype != weight.dtype for x in inputs):
            return f"norms of {name(inputs[0].dtype)} by {name(weight.dtype)}"
        if inputs[0].dim() not in (2, 3):
            return f"norms in {inputs[0].dim()} dimensions"
        return None if loadable(*inputs) else "norms of unaligned rows"


class Rope(RopeFamily):
    """Implements families.rope.Rope. In `enter`, rotation and cache write are two launches; Triton fuses them."""

    def __init__(self, package: Any = None, other: RopeFamily | None = None) -> None:
        self._turn = (package or import_module("flashinfer")).apply_rope_with_cos_sin_cache
        self._other = other or rope.Rope()
        self._delegation = Delegation()
        self.refused = self._delegation.refused

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        if reason := self._cannot(q, k, table):
            self._delegation.note(reason)
            return self._other(q, k, positions, table, interleaved=interleaved)
        size = q.shape[2]
        turned = self._turn(positions, q.flatten(1), k.flatten(1), size, table.flatten(1), not interleaved)
        return turned[0].view(q.shape), turned[1].view(k.shape)

    def _cannot(self, q: Tensor, k: Tensor, table: Tensor) -> str | None:
        """Return the reason why the rope kernel does not support these tensors, or None."""
        size, half = q.shape[2], table.shape[2]
        if size not in HEADS:
            return f"heads of {size}"
        if half * q.itemsize % LOADED != 0:  # a load would cross the middle of the rotated elements
            return f"angles of {2 * half} numbers"
        packed = q.stride(1) == k.stride(1) == size
        return None if packed and loadable(q, k) else "unaligned heads"


class Activation:
    """Implements families.activation.Activation."""

    def __init__(self, package: Any = None, other: ActivationFamily | None = None) -> None:
        package = package or import_module("flashinfer")
        self._silu, self._gelu_tanh = package.silu_and_mul, package.gelu_tanh_and_mul
        self._other = other or activation.Activation()
        self._delegation = Delegation()
        self.refused = self._delegation.refused

    def silu_mul(self, x: Tensor) -> Tensor:
        return self._gate(self._silu, x) if self._supports(x) else self._other.silu_mul(x)

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        return self._gate(self._gelu_tanh, x) if self._supports(x) else self._other.gelu_tanh_mul(x)

    def _gate(self, activate: Any, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
        activate(x, out=out)
        return out

    def _supports(self, x: Tensor) -> bool:
        """Return whether x [T, 2n] is contiguous and aligned, as the activation kernels require."""
        supported = x.is_contiguous() and loadable(x)
        if not supported:
            self._delegation.note("unaligned gates")
        return supported
