"""Linear layers, over any weight form (kernels/families/matrices.py Form)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.recipe import ProductRecipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from infd.kernels.families.matrices import Matrices
    from infd.models.base import PassAdapters
    from infd.models.blueprint import Blueprint


class Linear:
    """x W^T, plus an optional bias.

    Checkpoint modules with the same input are stacked in one weight, so that one call computes all their products.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        modules: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        family: Matrices | None = None,
    ) -> None:
        """Declare a weight [sum of outputs, inputs] that stacks `modules`: number of outputs by name.

        family  of the weight's form; None: the family `linear`
        """
        weights = {f"{name}.weight": rows for name, rows in modules.items()}
        self._weight = blueprint.matrix(weights, inputs, family or blueprint.ops.linear)
        self._bias = blueprint.declare({f"{name}.bias": rows for name, rows in modules.items()}) if bias else None
        self._target = blueprint.adaptable(modules, inputs)

    def recipe(self) -> ProductRecipe:
        bias = None if self._bias is None else self._bias.tensor
        return ProductRecipe(self._weight.form, self._weight.tensor, bias, self._weight.rounding)

    def __call__(self, x: Tensor, adapters: PassAdapters | None) -> Tensor:
        """Return [T, sum of outputs] for x [T, inputs]: x W^T, plus the bias, plus the adapters' products."""
        y = self._weight.multiply(x, None if self._bias is None else self._bias.tensor)
        if adapters is not None:
            adapters.add(y, x, self._target)
        return y
