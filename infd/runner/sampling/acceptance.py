"""Keep the samples of a span up to the first that a draft did not anticipate.

A sample depends only on the tokens before it and on the noise of its position. So a sample is a token of the answer if
all drafts before it are tokens of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def kept(inputs: Tensor, tokens: Tensor, sound: Tensor, first: Tensor, samples: Tensor, most: int) -> Tensor:
    """Return the number of samples to keep for each of S spans, [S] int64; 0 if the first sample is not sound.

    A sample is kept if it and all earlier samples of its span are sound, and each earlier sample equals the draft
    behind it.

    inputs          [N] int64: the token computed at each sampled position; a draft, except at a span's first position
    tokens          [N] int64: the token sampled at each position
    sound           [N] bool: whether the sample is valid
    first, samples  [S] int64: index of each span's first position, and the number of its positions
    most            largest of `samples`
    """
    place = torch.arange(most, device=tokens.device)
    index = first[:, None] + torch.minimum(place, samples[:, None] - 1)
    good = sound[index] & (place < samples[:, None])
    good[:, 1:] &= tokens[index[:, :-1]] == inputs[index[:, 1:]]
    return good.to(torch.int64).cumprod(1).sum(1)


def kept_on_host(inputs: Sequence[int], samples: Sequence[int], sample: Callable[[int], int | None]) -> list[int]:
    """Compute `kept` on the host, for arguments that it knows: a dozen calls of torch take longer than a loop.

    sample  returns the token sampled at a position, None if it is not sound; it is not called for positions of a span
            behind the first whose sample is not kept
    """
    counts, first = [], 0
    for most in samples:
        count, token = 0, None
        for at in range(first, first + most):
            if at > first and token != inputs[at]:
                break
            token = sample(at)
            if token is None:
                break
            count += 1
        counts.append(count)
        first += most
    return counts
