"""Gated activations of feed-forward networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Activation(Protocol):
    """activation(gate) * up, in x's dtype; an implementation may round the activation before the product."""

    def silu_mul(self, x: Tensor) -> Tensor:
        """Return silu(x[..., :n]) * x[..., n:] for x [T, 2n]."""

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        """Return gelu(x[..., :n]) * x[..., n:] for x [T, 2n], with the tanh approximation of gelu."""
