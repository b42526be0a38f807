"""Keep an answer from spelling words that it must not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def forbid(logits: Tensor, row: Tensor, last: Tensor, word: Tensor, fits: Tensor) -> None:
    """Make impossible the token that would complete a word.

    row, last   [W] int64: the row of logits that word i concerns, and the word's last token
    word, fits  [E]: for each token of a word before its last, which word it is of, and whether the answer has it there
    """
    missing = logits.new_zeros(len(row)).index_add_(0, word, (~fits).to(logits.dtype))
    # Added, not written: words that end alike name one place, and only some of them may be about to be completed.
    penalty = logits.new_zeros(len(row)).masked_fill_(missing == 0, float("-inf"))
    logits.index_put_((row, last), penalty, accumulate=True)
