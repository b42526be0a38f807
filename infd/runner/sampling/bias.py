"""Add a request's logit_bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def add(logits: Tensor, row: Tensor, token: Tensor, bias: Tensor) -> None:
    """Add bias[i] to the logit of token[i] in row[i]; all three [entries], no pair twice."""
    logits.index_put_((row, token), bias, accumulate=True)
