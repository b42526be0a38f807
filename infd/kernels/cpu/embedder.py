"""An encoder and the pooling of its texts without torch, whose calls take longer than those of ctypes.

After an encoder's layers the CPU's cache holds their weights, and each call of torch takes 20 to 40 us. Inputs and
hidden states are in persistent memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from infd.kernels.cpu.pooling import Pooling
from infd.kernels.cpu.span_attention import SpanAttention
from infd.kernels.families.span_attention import SpanBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from infd.kernels.cpu.encoder import Stacked
    from infd.kernels.cpu.library import Library
    from infd.pooling.settings import Reduction

CPU: Final = torch.device("cpu")
REDUCTIONS: Final = ("mean", "cls", "lasttoken")


class Embedder:
    """Implements families.encoder.TextEmbedder."""

    def __init__(self, stacked: Stacked, library: Library, reduction: Reduction, most: int) -> None:
        """Allocate memory for `most` tokens. reduction: one of REDUCTIONS."""
        self.tokens = np.zeros(most, np.int64)
        self.positions = np.zeros(most, np.int64)
        self._addresses = self.tokens.ctypes.data, self.positions.ctypes.data
        self._hidden = torch.empty((most, stacked.width), dtype=stacked.dtype)
        self._stacked, self._reduction = stacked, reduction
        self._attention, self._pooling = SpanAttention(library), Pooling(library)

    def __call__(
        self, offsets: Sequence[int], beat: Callable[[], None]
    ) -> tuple[npt.NDArray[np.float32], Sequence[bool]]:
        tokens, texts = offsets[-1], len(offsets) - 1
        plan, queries = self._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU)), None
        if self._reduction == "mean":
            counts = [end - begin for begin, end in pairwise(offsets)]
        else:
            counts = [1] * texts
            read = offsets[:-1] if self._reduction == "cls" else [end - 1 for end in offsets[1:]]
            queries = self._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU, queries=read))
        embeddings = self._pooling.prepare(self._hidden, counts)
        self._stacked.embed(*self._addresses, self._hidden, plan, queries, beat)
        return embeddings()
