"""Sums of the hidden states of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.host import Upload


class Pooling(Protocol):
    """Reduces the hidden states of each span of a step to one vector."""

    def sums(self, states: Tensor, counts: Sequence[int], upload: Upload) -> Tensor:
        """Return the sum of each span's states, [S, width] float32.

        states  [N, width], span after span; rows after the last span are not read
        counts  [S]: the spans' numbers of rows
        upload  copies tables that the host computes for a step to the device
        """
