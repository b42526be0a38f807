"""Keep the likely tokens only: min-p, then top-k, then top-p of what these two have left.

All three come down to a smallest logit to keep, found among a row's few largest
ones; a row is sorted whole only if they do not settle it. Tokens that are
equally likely stay or go together, so the answer depends on nothing but the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Candidates(NamedTuple):
    """The largest logits of each row.

    logits   [n, width] float32, descending; -inf where not kept
    tokens   [n, width] int64
    settled  [n] bool: every token that is kept is here
    """

    logits: Tensor
    tokens: Tensor
    settled: Tensor


def truncate(logits: Tensor, width: int, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Candidates:
    """Find the tokens to keep among the `width` largest of each row, width at least as large as any top_k.

    logits  [n, vocab] float32, 0 at the largest
    top_k   [n] integers, 0: no limit
    top_p   [n] float32, 1: no limit
    min_p   [n] float32: keeps tokens at least min_p times as likely as the most likely one; 0: no limit
    """
    whole = width >= logits.shape[1]
    values, tokens = logits.sort(-1, descending=True) if whole else logits.topk(width, -1)
    smallest = min_p.log()
    kth = values.gather(1, (top_k.long().clamp(min=1) - 1)[:, None])[:, 0]
    smallest = torch.where(top_k > 0, torch.maximum(smallest, kth), smallest)

    total = logits.masked_fill(logits < smallest[:, None], float("-inf")).logsumexp(-1)
    share = (values.masked_fill(values < smallest[:, None], float("-inf")) - total[:, None]).exp_()
    before = share.cumsum(-1) - share  # how much of the mass is likelier than this token
    nucleus = (before < top_p[:, None]).sum(-1).clamp(min=1) - 1
    last = values.gather(1, nucleus[:, None])[:, 0]
    smallest = torch.where(top_p < 1, torch.maximum(smallest, last), smallest)

    settled = values[:, -1] < smallest
    if whole:
        settled = torch.ones_like(settled)
    return Candidates(values.masked_fill_(values < smallest[:, None], float("-inf")), tokens, settled)
