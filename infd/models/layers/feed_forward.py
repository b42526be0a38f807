"""The feed-forward networks of encoders: down(activation(up x)), or down(activation(gate x) * up x)."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch.nn import functional as F

from infd.models.layers.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from infd.kernels.recipe import ProductRecipe
    from infd.models.base import PassAdapters
    from infd.models.blueprint import Blueprint
    from infd.models.encoder_dimensions import EncoderDimensions

# The names of recipes, by config.json's.
RECIPES = MappingProxyType(
    {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}
)
_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": F.gelu, "gelu_new": _TANH, "gelu_pytorch_tanh": _TANH, "relu": F.relu, "silu": F.silu}
)


Gated = Literal["none", "gate_up", "up_gate"]


class FeedForwardRecipe(NamedTuple):
    """The fields of EncoderLayerRecipe that describe the network."""

    up: ProductRecipe
    gated: Gated
    activation: str
    down: ProductRecipe


class FeedForward:
    """down(activation(up x))."""

    def __init__(self, blueprint: Blueprint, up: str, down: str, dims: EncoderDimensions, *, bias: bool = True) -> None:
        """Declare the projections. up, down: names of the checkpoint's modules."""
        self._activation, self._name = ACTIVATIONS[dims.activation], RECIPES[dims.activation]
        self._up = Linear(blueprint, {up: dims.inner}, dims.hidden, bias=bias, family=blueprint.ops.encoder_linear)
        self._down = Linear(blueprint, {down: dims.hidden}, dims.inner, bias=bias, family=blueprint.ops.encoder_linear)

    def recipe(self) -> FeedForwardRecipe:
        return FeedForwardRecipe(self._up.recipe(), "none", self._name, self._down.recipe())

    def __call__(self, x: Tensor, adapters: PassAdapters | None) -> Tensor:
        return self._down(self._activation(self._up(x, adapters)), adapters)


class GatedFeedForward:
    """down(activation(gate x) * up x)."""

    def __init__(
        self,
        blueprint: Blueprint,
        gate_up: Mapping[str, int],
        down: str,
        dims: EncoderDimensions,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        up_first: bool = False,
    ) -> None:
        """Declare the projections.

        gate_up    the checkpoint's modules that compute gate, then up: number of outputs by name
        up_first   whether they compute up, then gate
        down_bias  whether the down projection has a bias; None: as `bias`
        """
        self._activation, self._name = ACTIVATIONS[dims.activation], RECIPES[dims.activation]
        self._up_first = up_first
        self._gate_up = Linear(blueprint, gate_up, dims.hidden, bias=bias, family=blueprint.ops.encoder_linear)
        self._down = Linear(
            blueprint,
            {down: dims.hidden},
            dims.inner,
            bias=bias if down_bias is None else down_bias,
            family=blueprint.ops.encoder_linear,
        )

    def recipe(self) -> FeedForwardRecipe:
        order: Gated = "up_gate" if self._up_first else "gate_up"
        return FeedForwardRecipe(self._gate_up.recipe(), order, self._name, self._down.recipe())

    def __call__(self, x: Tensor, adapters: PassAdapters | None) -> Tensor:
        gate, up = self._gate_up(x, adapters).chunk(2, dim=-1)
        if self._up_first:
            gate, up = up, gate
        return self._down(self._activation(gate) * up, adapters)
