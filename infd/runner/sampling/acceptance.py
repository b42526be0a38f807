"""Keep the samples of a span up to the first that a draft did not anticipate.

A sample depends only on the tokens before it and on the noise of its position. So a sample is a token of the answer if
all drafts before it are tokens of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def kept_on_host(
    inputs: Sequence[int], tokens: Sequence[int], sound: Sequence[int], samples: Sequence[int]
) -> list[int]:
    """Return what `kept` returns, if the host knows all arguments: a dozen of torch's calls take longer than a loop."""
    counts, first = [], 0
    for most in samples:
        count, end = 0, first + most
        for at in range(first, end):
            if not sound[at] or (at > first and tokens[at - 1] != inputs[at]):
                break
            count += 1
        counts.append(count)
        first = end
    return counts
