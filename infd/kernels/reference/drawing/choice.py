"""Sample one token of each row in proportion to exp(logit): Gumbel-max.

Source: Gumbel 1954; Maddison et al. 2014, A* Sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.reference.drawing.noise import gumbel, token_hash

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.reference.drawing.truncation import Candidates

BLOCK = 4  # rows at a time on a CPU, so that their noise stays in the CPU's cache


def among_all(logits: Tensor, keys: Tensor, hashed: Tensor) -> Tensor:
    """Sample a token for each row of logits [n, vocab]: [n] int64.

    keys    [n, 2] as `row_keys` returns them
    hashed  [vocab] as `token_hash` returns them for all tokens
    """
    chosen = keys.new_empty(len(logits), dtype=torch.int64)
    block = len(logits) if logits.is_cuda else BLOCK
    for first in range(0, len(logits), block):
        rows = slice(first, first + block)
        chosen[rows] = gumbel(keys[rows], hashed).add_(logits[rows]).argmax(-1)
    return chosen


def among(candidates: Candidates, keys: Tensor) -> Tensor:
    """Sample a candidate for each row: [n] int64, with the noise that `among_all` computes for the candidates."""
    noise = gumbel(keys, token_hash(candidates.tokens))
    return candidates.tokens.gather(1, noise.add_(candidates.logits).argmax(-1, keepdim=True))[:, 0]
