"""The gated feed-forward network: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.recipe import GatedRecipe
from infd.models.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.base import Batch
    from infd.models.blueprint import Blueprint
    from infd.models.dimensions import Dimensions


class GatedMLP:
    """The gated feed-forward network of one layer."""

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        dims: Dimensions,
        *,
        bias: bool = False,
        fused: bool = False,
        both: str = "gate_up_proj",
        down: str = "down_proj",
    ) -> None:
        """Declare the projections.

        fused  whether the checkpoint stores gate and up as one tensor
        both   name of that tensor's module
        down   name of the down projection's module
        """
        family = blueprint.ops.activation
        self._activated = dims.activation
        self._activation = {"silu": family.silu_mul, "gelu_pytorch_tanh": family.gelu_tanh_mul}[dims.activation]
        outputs = {both: 2 * dims.inner} if fused else {"gate_proj": dims.inner, "up_proj": dims.inner}
        self._gate_up = Linear(
            blueprint, {f"{name}.{part}": size for part, size in outputs.items()}, dims.hidden, bias=bias
        )
        self._down = Linear(blueprint, {f"{name}.{down}": dims.hidden}, dims.inner, bias=bias)

    def recipe(self) -> GatedRecipe:
        return GatedRecipe(gate_up=self._gate_up.recipe(), activation=self._activated, down=self._down.recipe())

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the output [T, hidden] of the network for x [T, hidden]."""
        return self._down(self._activation(self._gate_up(x, batch.adapters)), batch.adapters)
