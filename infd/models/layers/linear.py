"""Linear layers, over any weight form (kernels/families/matrices.py Form)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.recipe import ProductRecipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from infd.models.base import PassAdapters
    from infd.models.blueprint import Blueprint


class Linear:
    """x W^T, plus an optional bias.

    Checkpoint modules that read the same input are stacked in one weight: one pass over memory, one call.
    """

    def __init__(self, blueprint: Blueprint, modules: Mapping[str, int], inputs: int, *, bias: bool = False) -> None:
        """Declare a weight [sum of outputs, inputs] that stacks checkpoint modules; `modules` maps name to outputs."""
        weights = {f"{name}.weight": rows for name, rows in modules.items()}
        self._weight = blueprint.matrix(weights, inputs, blueprint.ops.linear)
        self._bias = blueprint.declare({f"{name}.bias": rows for name, rows in modules.items()}) if bias else None
        self._target = blueprint.adaptable(modules, inputs)

    def recipe(self) -> ProductRecipe:
        bias = None if self._bias is None else self._bias.tensor
        return ProductRecipe(self._weight.form, self._weight.tensor, bias)

    def __call__(self, x: Tensor, adapters: PassAdapters | None) -> Tensor:
        """Return the products [T, sum of outputs] of x [T, inputs], with bias and adapters."""
        y = self._weight.multiply(x, None if self._bias is None else self._bias.tensor)
        if adapters is not None:
            adapters.add(y, x, self._target)
        return y
