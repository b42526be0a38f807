"""RMSNorm of rows, and of heads; LayerNorm of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.recipe import NormRecipe


class Norm(Protocol):
    """Norms over the last axis, in float32, returned in x's dtype.

    RMSNorm: x / sqrt(mean(x²) + eps) * (weight + offset). LayerNorm: (x - mean(x)) / sqrt(variance(x) + eps) * weight
    + bias.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return x [..., n] normed with weight [n]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual), each [T, n]. Both inputs may be overwritten."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the LayerNorm of x [T, n] with weight and bias [n]."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)


class HeadNorm(Protocol):
    """RMSNorm of heads [T, H, D]: of each head if the weight has D elements, else of a token's heads together."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def recipe(self) -> NormRecipe: ...
