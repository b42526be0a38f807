"""RMSNorm, alone or together with the addition to the residual stream before it; or the addition alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.recipe import NormRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.parameter import Blueprint


class RMSNorm:
    def __init__(self, blueprint: Blueprint, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        """Declare the weight, to which `offset` is added: Gemma stores how far it is from 1."""
        self._norm = blueprint.ops.norm
        self._weight = blueprint.declare({f"{name}.weight": size})
        self._eps, self._offset = eps, offset

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm.rms_norm(x, self._weight.tensor, self._eps, self._offset)

    def recipe(self) -> NormRecipe:
        return NormRecipe(self._weight.tensor, self._eps, self._offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, which it starts where there is none. Return (the stream normed, the stream)."""
        if residual is None:
            return self(x), x
        return self._norm.add_rms_norm(x, residual, self._weight.tensor, self._eps, self._offset)


class OverAllHeads:
    """A norm of heads [T, H, D] that takes all of a token's heads as one."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm
        self.recipe = norm.recipe

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x.flatten(1)).view(x.shape)


class NoNorm:
    """Stands where a family reads the residual stream as it is."""

    def recipe(self) -> None:
        return None

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream, which it starts where there is none. Return the stream, twice."""
        stream = x if residual is None else x + residual
        return stream, stream
