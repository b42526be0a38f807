"""Compute the log-probabilities of chosen tokens, of the likeliest tokens and of listed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

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


def score(
    logits: Tensor, token: Tensor, most: int, listed: Tensor | None = None, plain: Tensor | None = None
) -> Scores:
    """Return the log-softmax of logits [n, vocab] for token [n], and for the `most` likeliest tokens of each row.

    listed  [n, m] int64, padded with -1: tokens that replace the likeliest of a row; None: no row has any
    plain   [n] bool: rows whose logits are returned instead; None: no row's
    """
    total = logits.logsumexp(-1, keepdim=True)
    if plain is not None:
        total = total.masked_fill(plain[:, None], 0)
    top, top_ids = logits.topk(most, -1)
    if listed is not None:
        width = max(most, listed.shape[1])
        top, top_ids = (torch.nn.functional.pad(each, (0, width - most)) for each in (top, top_ids))
        ids = torch.nn.functional.pad(listed, (0, width - listed.shape[1]), value=-1)
        given = logits.gather(1, ids.clamp(min=0))
        top, top_ids = torch.where(ids >= 0, given, top), torch.where(ids >= 0, ids, top_ids)
    return Scores((logits.gather(1, token[:, None]) - total)[:, 0], top - total, top_ids)


def rank(logits: Tensor, token: Tensor) -> Tensor:
    """Return the rank [n] int64 of token [n] in its row of logits [n, vocab]; the likeliest token has rank 1."""
    return 1 + (logits > logits.gather(1, token[:, None])).sum(-1)
