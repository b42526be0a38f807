"""Keep an answer from ending before it has min_tokens tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def forbid(logits: Tensor, row: Tensor, token: Tensor) -> None:
    """Make token[i] impossible in row[i]; both [entries]."""
    logits.index_put_((row, token), logits.new_full((), float("-inf")))  # filled there: a copy would be waited for
