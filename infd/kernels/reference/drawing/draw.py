"""Sample tokens, sorting only as many of a row's logits as its limits need.

On a GPU the host waits for the sort if rows have limits, because the host decides whether the sorted logits suffice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.reference.drawing import choice, narrowing, noise, repeats, shaping, temperature, truncation

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import Drawing

WIDTH = 128  # number of a row's largest logits that are sorted first
WIDER = 16  # the width grows by this factor until the sorted logits suffice, because sorting whole rows is slow


class Draw:
    """Implements families.draw.Draw."""

    forbid = staticmethod(shaping.forbid)
    penalize_repetition = staticmethod(shaping.penalize_repetition)
    penalize_answer = staticmethod(shaping.penalize_answer)
    penalize_repeats = staticmethod(repeats.penalize)
    narrow = staticmethod(narrowing.narrow)

    def __init__(self) -> None:
        self._hashed = torch.empty(0, dtype=torch.int32)  # hashes of all token ids, for the last call's vocabulary

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = logits.max(-1)
        return values.float(), tokens

    def __call__(self, logits: Tensor, drawing: Drawing, *, truncated: bool) -> Tensor:
        keys = noise.row_keys(drawing.seed[:, 0], drawing.seed[:, 1], drawing.position)
        cooled = temperature.apply(logits[drawing.rows], drawing.largest, drawing.temperature)
        if truncated:
            return _among_likely(cooled, drawing, keys)
        return choice.among_all(cooled, keys, self._hashes(logits.shape[1], logits.device))

    def _hashes(self, vocabulary: int, device: torch.device) -> Tensor:
        if len(self._hashed) != vocabulary or self._hashed.device != device:
            self._hashed = noise.token_hash(torch.arange(vocabulary, device=device))
        return self._hashed


def _among_likely(logits: Tensor, drawing: Drawing, keys: Tensor) -> Tensor:
    """Return a token for each row, sorting only as many of its logits as the rows' limits need."""
    tokens = torch.empty_like(drawing.rows)
    left = torch.arange(len(tokens), device=tokens.device)
    width = max(WIDTH, 2 * int(drawing.top_k.max()))
    while left.numel():
        width = min(width, logits.shape[1])
        candidates = truncation.truncate(
            logits[left], width, top_k=drawing.top_k[left], top_p=drawing.top_p[left], min_p=drawing.min_p[left]
        )
        tokens[left] = choice.among(candidates, keys[left])
        left = left[~candidates.settled]
        width *= WIDER
    return tokens
