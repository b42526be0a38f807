"""Norms, optionally fused with the preceding residual addition; and the residual addition without a norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.recipe import LayerNormRecipe, NormRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.blueprint import Blueprint


class RMSNorm:
    """RMSNorm over the last axis; see kernels/families/norm.py Norm."""

    def __init__(self, blueprint: Blueprint, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        """Declare the weight [size]. `offset` is added to the weight; Gemma stores its weights minus 1."""
        self._norm = blueprint.ops.norm
        self._weight = blueprint.declare({f"{name}.weight": size})
        self._eps, self._offset = eps, offset

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm.rms_norm(x, self._weight.tensor, self._eps, self._offset)

    def recipe(self) -> NormRecipe:
        return NormRecipe(self._weight.tensor, self._eps, self._offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream; if `residual` is None, x is the stream. Return (normed stream, stream)."""
        if residual is None:
            return self(x), x
        return self._norm.add_rms_norm(x, residual, self._weight.tensor, self._eps, self._offset)


class LayerNorm:
    """LayerNorm over the last axis; see kernels/families/norm.py Norm."""

    def __init__(self, blueprint: Blueprint, name: str, size: int, eps: float, *, bias: bool = True) -> None:
        """Declare weight and bias, [size] each."""
        self._weight = blueprint.declare({f"{name}.weight": size})
        self._bias = blueprint.declare({f"{name}.bias": size}) if bias else None
        self._norm, self._eps = blueprint.ops.norm, eps

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self._bias is None else self._bias.tensor
        return self._norm.layer_norm(x, self._weight.tensor, bias, self._eps)

    def recipe(self) -> LayerNormRecipe:
        return LayerNormRecipe(self._weight.tensor, None if self._bias is None else self._bias.tensor, self._eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream; if `residual` is None, x is the stream. Return (normed stream, stream)."""
        stream = x if residual is None else x + residual
        return self(stream), stream


class Constant:
    """RMSNorm without a learned weight."""

    def __init__(self, blueprint: Blueprint, size: int, eps: float) -> None:
        self._norm, self._eps = blueprint.ops.norm, eps
        self._weight = torch.ones(size, dtype=blueprint.dtype, device=blueprint.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm.rms_norm(x, self._weight, self._eps)

    def recipe(self) -> NormRecipe:
        return NormRecipe(self._weight, self._eps, 0.0)


class OverAllHeads:
    """RMSNorm over all heads of a token together: x [T, H, D] is normed as [T, H * D]."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm
        self.recipe = norm.recipe

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.flatten(1)).view(x.shape)


class NoNorm:
    """The residual addition without a norm, for families that apply norms to sublayer outputs only."""

    def recipe(self) -> None:
        return None

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream; if `residual` is None, x is the stream. Return (stream, stream)."""
        stream = x if residual is None else x + residual
        return stream, stream
