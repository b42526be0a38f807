"""Forbid tokens that would complete a bad word."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def forbid(logits: Tensor, row: Tensor, last: Tensor, word: Tensor, matches: Tensor) -> None:
    """Set the logit of each bad word's last token to -inf if the row's latest tokens are the word's other tokens.

    logits     [N, vocab] float32
    row, last  [W] int64: row and last token of each word
    word       [E] int64: for each token of a word except the last, the index of the word
    matches    [E] bool: whether the row's token at the same distance from the end equals that token
    """
    missing = logits.new_zeros(len(row)).index_add_(0, word, (~matches).to(logits.dtype))
    # Added, not assigned: words may have equal last tokens, and a word that does not match must change nothing.
    penalty = logits.new_zeros(len(row)).masked_fill_(missing == 0, float("-inf"))
    logits.index_put_((row, last), penalty, accumulate=True)
