"""Temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def apply(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Return (logits - largest) / temperature: 0 at the likeliest token, so that no temperature overflows.

    largest, temperature  [n] float32
    """
    return (logits - largest[:, None]).div_(temperature[:, None])
