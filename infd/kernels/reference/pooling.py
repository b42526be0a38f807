"""Sums of hidden states in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Pooling:
    """Implements families.pooling.Pooling."""

    def sums(self, states: Tensor, counts: Sequence[int]) -> Tensor:
        owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(states.device)
        found = torch.zeros((len(counts), states.shape[1]), device=states.device)
        return found.index_add_(0, owner, states[: len(owner)].float())
