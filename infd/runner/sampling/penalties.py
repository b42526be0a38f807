"""Make tokens that have occurred less likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def repetition(logits: Tensor, history: Tensor, length: Tensor, penalty: Tensor) -> None:
    """Divide positive logits of the tokens of prompt and answer by the penalty, and multiply negative ones by it.

    history  [n, L] int64
    length   [n] int64: how many tokens of each history count
    penalty  [n] float32
    """
    # The first token stands in for those that do not count: writing its logit again changes nothing.
    seen = torch.where(_positions(history) < length[:, None], history, history[:, :1])
    picked = logits.gather(1, seen)
    factor = penalty[:, None]
    logits.scatter_(1, seen, torch.where(picked > 0, picked / factor, picked * factor))


def frequency(
    logits: Tensor, history: Tensor, length: Tensor, prompt: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Subtract, for each token of the answer, presence once and frequency as often as it occurs.

    history              [n, L] int64
    length, prompt       [n]: the answer is history[prompt:length]
    presence, frequency  [n] float32
    """
    position = _positions(history)
    generated = (position >= prompt[:, None]) & (position < length[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, history, generated.to(logits.dtype))
    logits -= counts * frequency[:, None] + (counts > 0) * presence[:, None]


def _positions(history: Tensor) -> Tensor:
    return torch.arange(history.shape[1], device=history.device)
