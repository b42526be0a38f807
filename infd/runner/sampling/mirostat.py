"""Mirostat: limit the candidates so that the surprise of sampled tokens stays near a target.

Sources: Basu et al. 2021, Mirostat; llama.cpp, whose two versions these are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

LIKELIEST: Final = 100  # tokens from which version 1 estimates the exponent of Zipf's law


def limits(cooled: Tensor, version: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """Return top_k [n] int32 and min_p [n] float32 that limit rows to a surprise of about `mu` bits.

    cooled   [n, vocab] float32: logits divided by the temperature, 0 at the largest
    version  [n]: 1 limits by top_k alone, 2 by min_p alone
    """
    vocabulary = cooled.shape[1]
    likeliest = cooled.topk(min(LIKELIEST, vocabulary), -1).values
    rank = torch.arange(1, likeliest.shape[1], dtype=torch.float32, device=cooled.device)
    steps = ((rank + 1) / rank).log()
    falls = likeliest[:, :-1] - likeliest[:, 1:]
    known = falls.isfinite()
    squares = (steps**2 * known).sum(-1)
    exponent = torch.where(known, steps * falls, 0.0).sum(-1) / squares
    excess = exponent - 1
    count = (excess * 2**mu / (1 - vocabulary**-excess)) ** (1 / exponent)
    # Not a number: there is a single candidate, or the likeliest are equally likely.
    count = torch.where(squares > 0, count.nan_to_num(vocabulary), 1.0).clamp(1, vocabulary)

    surprise = cooled.logsumexp(-1) / math.log(2)  # of the likeliest token
    share = (2 ** (surprise - mu)).clamp(max=1.0)
    first = version == 1
    return torch.where(first, count, 0).to(torch.int32), torch.where(first, 0.0, share)


def adapt(kept: Tensor, token: Tensor, mu: Tensor, tau: Tensor, eta: Tensor) -> Tensor:
    """Return mu [n] after sampling token [n] from the kept logits [n, vocab]."""
    surprise = (kept.logsumexp(-1) - kept.gather(1, token[:, None])[:, 0]) / math.log(2)
    return mu - eta * (surprise - tau)
