"""Pooling in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from infd.kernels.families.pooling import LEAST_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.host import Upload
    from infd.kernels.families.pooling import Array


class Pooling:
    """Implements families.pooling.Pooling."""

    def sums(self, states: Tensor, counts: Sequence[int], divisors: Sequence[float], upload: Upload) -> Tensor:
        if all(count == 1 for count in counts) and all(divisor == 1 for divisor in divisors):
            return states[: len(counts)].to(torch.float32, copy=True)
        owner = upload(np.repeat(np.arange(len(counts)), counts))
        found = torch.zeros((len(counts), states.shape[1]), device=states.device)
        found.index_add_(0, owner, states[: len(owner)].float())
        return found.div_(upload(np.array(divisors, np.float32))[:, None])

    def normalized(self, rows: Tensor) -> tuple[Array, Sequence[bool]]:
        lengths = rows.square().sum(-1, keepdim=True).sqrt()
        finite: list[bool] = rows.isfinite().all(-1).tolist()
        return (rows / lengths.clamp(min=LEAST_LENGTH)).numpy(), finite
