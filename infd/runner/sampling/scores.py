"""Compute the log-probabilities of chosen tokens and of the likeliest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Scores(NamedTuple):
    """Log-probabilities of n rows.

    chosen   [n]: of the chosen tokens
    top      [n, k]: of the k likeliest tokens, descending
    top_ids  [n, k] int64: the k likeliest tokens
    """

    chosen: Tensor
    top: Tensor
    top_ids: Tensor


def score(logits: Tensor, token: Tensor, most: int) -> Scores:
    """Return the log-softmax of logits [n, vocab] for token [n], and for the `most` likeliest tokens of each row."""
    total = logits.logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(most, -1)
    return Scores((logits.gather(1, token[:, None]) - total)[:, 0], top - total, top_ids)


def rank(logits: Tensor, token: Tensor) -> Tensor:
    """Return the rank [n] int64 of token [n] in its row of logits [n, vocab]; the likeliest token has rank 1."""
    return 1 + (logits > logits.gather(1, token[:, None])).sum(-1)
