"""Forbid the tokens that a bitmask does not allow: a grammar's, or a request's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def apply(logits: Tensor, bits: Tensor) -> None:
    """Make every token impossible whose bit is 0. bits [n, ceil(vocab / 32)] int32, lowest bit first."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, float("-inf"))
