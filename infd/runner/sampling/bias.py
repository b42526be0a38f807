"""Add logit_bias to the logits of the requests that set it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def add(logits: Tensor, row: Tensor, token: Tensor, bias: Tensor) -> None:
    """Add bias[i] to the logit of token[i] in row[i].

    logits      [N, vocab] float32
    row, token  [E] int64; no pair occurs twice
    bias        [E] float32
    """
    logits.index_put_((row, token), bias, accumulate=True)
