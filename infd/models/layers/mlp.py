"""The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.parameter import Blueprint


class GatedMLP:
    def __init__(self, blueprint: Blueprint, name: str, hidden_size: int, inner_size: int, *, bias: bool) -> None:
        self._activation = blueprint.ops.activation
        self._gate_up = Linear(
            blueprint, {f"{name}.gate_proj": inner_size, f"{name}.up_proj": inner_size}, hidden_size, bias=bias
        )
        self._down = Linear(blueprint, {f"{name}.down_proj": hidden_size}, inner_size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation.silu_mul(self._gate_up(x)))
