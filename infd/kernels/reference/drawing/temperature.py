"""Sharpen or flatten the distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def apply(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Return (logits - largest) / temperature: 0 at the most likely token, so a tiny temperature cannot overflow.

    largest, temperature  [n] float32
    """
    return (logits - largest[:, None]).div_(temperature[:, None])
