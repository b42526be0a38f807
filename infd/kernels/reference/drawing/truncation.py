"""Limit sampling to the likeliest tokens: min-p, then top-k, then top-p of the remaining tokens.

Each limit becomes a smallest logit to keep, found among the row's largest logits; a whole row is sorted only if
these logits do not suffice. Equally likely tokens are kept or dropped together, so the result depends on the row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Candidates(NamedTuple):
    """The largest logits of each row.

    logits   [n, width] float32, descending; -inf for dropped tokens
    tokens   [n, width] int64
    settled  [n] bool: all tokens to keep are among these logits
    """

    logits: Tensor
    tokens: Tensor
    settled: Tensor


def truncate(logits: Tensor, width: int, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Candidates:
    """Return the tokens to keep among the `width` largest logits of each row; `width` is at least the largest top_k.

    logits  [n, vocab] float32, 0 at the largest
    top_k   [n] integers; 0: no limit
    top_p   [n] float32; 1: no limit
    min_p   [n] float32: smallest probability to keep, relative to the likeliest token's; 0: no limit
    """
    whole = width >= logits.shape[1]
    values, tokens = logits.sort(-1, descending=True) if whole else logits.topk(width, -1)
    smallest = min_p.log()
    kth = values.gather(1, (top_k.long().clamp(min=1) - 1)[:, None])[:, 0]
    smallest = torch.where(top_k > 0, torch.maximum(smallest, kth), smallest)

    total = logits.masked_fill(logits < smallest[:, None], float("-inf")).logsumexp(-1)
    share = (values.masked_fill(values < smallest[:, None], float("-inf")) - total[:, None]).exp_()
    before = share.cumsum(-1) - share  # probability mass of the likelier tokens
    nucleus = (before < top_p[:, None]).sum(-1).clamp(min=1) - 1
    last = values.gather(1, nucleus[:, None])[:, 0]
    smallest = torch.where(top_p < 1, torch.maximum(smallest, last), smallest)

    settled = values[:, -1] < smallest
    if whole:
        settled = torch.ones_like(settled)
    return Candidates(values.masked_fill_(values < smallest[:, None], float("-inf")), tokens, settled)
