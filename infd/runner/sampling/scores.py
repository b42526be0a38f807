"""Say how likely the chosen token and the most likely ones were, by the model's own logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Scores(NamedTuple):
    """Log-probabilities of some rows: chosen [n], top [n, k] descending, top_ids [n, k] int64."""

    chosen: Tensor
    top: Tensor
    top_ids: Tensor


def score(logits: Tensor, token: Tensor, most: int) -> Scores:
    """Return log-softmax at the tokens chosen [n], and at the `most` largest of each row of logits [n, vocab]."""
    total = logits.logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(most, -1)
    return Scores((logits.gather(1, token[:, None]) - total)[:, 0], top - total, top_ids)


def rank(logits: Tensor, token: Tensor) -> Tensor:
    """Return the place [n] int64 of the tokens [n] among all of logits [n, vocab], 1 for the most likely."""
    return 1 + (logits > logits.gather(1, token[:, None])).sum(-1)
