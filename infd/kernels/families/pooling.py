"""What remains of the hidden states of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.host import Upload

    Array = npt.NDArray[np.float32]

LEAST_LENGTH: Final = 1e-12  # shorter vectors are divided by this length, as in torch's normalize


class Pooling(Protocol):
    """Reduces the hidden states of each span of a step to one vector."""

    def sums(self, states: Tensor, counts: Sequence[int], divisors: Sequence[float], upload: Upload) -> Tensor:
        """Return the sum of each span's states over the span's divisor, [S, width] float32, in memory of its own.

        states    [N, width], span after span; rows after the last span are not read
        counts    [S]: the spans' numbers of rows
        divisors  [S]
        upload    copies tables that the host computes for a step to the device
        """

    def normalized(self, rows: Tensor) -> tuple[Array, Sequence[bool]]:
        """Return rows of length 1, [N, width] float32, and of each row whether its numbers are finite.

        Called on the host, once the rows are copied to it.

        rows  [N, width] float32; consecutive elements of a row are adjacent
        """
