"""The Muon optimizer, for weight matrices. train.py trains all other parameters with AdamW.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

# Coefficients of the quintic iteration, which moves singular values towards 1.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ROUNDS: Final = 5


class Muon(torch.optim.Optimizer):
    """The Muon optimizer: SGD with momentum and orthogonalized updates."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(momentum, group["momentum"]))
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return an approximation of U Vᵀ for a matrix U S Vᵀ, by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    x: Tensor = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T.to(matrix.dtype) if tall else x.to(matrix.dtype)
