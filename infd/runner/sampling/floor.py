"""Forbid end ids until min_tokens are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def forbid(logits: Tensor, row: Tensor, token: Tensor, early: Tensor) -> None:
    """Set the logit of token[i] in row[i] to -inf if early[i].

    logits      [N, vocab] float32
    row, token  [E] int64; no pair occurs twice
    early       [E] bool
    """
    # Added, not assigned, so that the host need not know which end ids are forbidden.
    penalty = torch.zeros(len(row), device=logits.device).masked_fill_(early, float("-inf"))
    logits.index_put_((row, token), penalty, accumulate=True)
