"""Forbid end ids until min_tokens are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def forbid(logits: Tensor, row: Tensor, token: Tensor) -> None:
    """Set the logit of token[i] in row[i] to -inf.

    logits      [N, vocab] float32
    row, token  [E] int64
    """
    # The device creates -inf: a copy from the host would synchronize.
    logits.index_put_((row, token), logits.new_full((), float("-inf")))
