"""RMSNorm, of rows and of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.recipe import NormRecipe


class Norm(Protocol):
    """RMSNorm over the last axis: x / sqrt(mean(x²) + eps) * (weight + offset), in float32, given back in x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual). Both x and residual may be used up."""


class HeadNorm(Protocol):
    """What heads [T, H, D] pass through: each by itself if the weight has D numbers, else all of a token's as one."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def recipe(self) -> NormRecipe: ...
