"""An encoder and the pooling of its texts without torch, whose calls take longer than those of ctypes.

After an encoder's layers the CPU's cache holds their weights, and each call of torch takes 20 to 40 us. Inputs and
hidden states are in persistent memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import torch

from infd.kernels.cpu.pooling import Pooling
from infd.kernels.cpu.span_attention import SpanAttention
from infd.kernels.families.span_attention import SpanBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.cpu.library import Library
    from infd.kernels.families.span_attention import SpanPlan
    from infd.pooling.settings import Reduction

CPU: Final = torch.device("cpu")
REDUCTIONS: Final = ("mean", "cls", "lasttoken")


class Queries(NamedTuple):
    """The tokens whose results are read.

    address  of [rows] int64, ascending, perhaps repeated
    plan     of attention whose queries are these tokens
    """

    rows: int
    address: int
    plan: SpanPlan


class Layers(Protocol):
    """An encoder's embeddings and layers, see `encoder.py`. width: of hidden states; dtype: of hidden states."""

    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def embed(
        self,
        x: Tensor,
        count: int,
        token_address: int,
        position_address: int,
        plan: SpanPlan,
        queries: Queries | None,
        beat: Callable[[], None],
    ) -> None:
        """Compute the embeddings and all layers of `count` tokens whose types are 0, on x [at least count, width].

        token_address, position_address  of [count] int64
        queries                          the tokens whose results become the first rows of x; None: all
        beat                             called before each few layers
        """


class Embedder:
    """Implements families.encoder.TextEmbedder."""

    def __init__(self, layers: Layers, library: Library, reduction: Reduction, most: int) -> None:
        """Allocate memory for `most` tokens. reduction: one of REDUCTIONS."""
        self.tokens = np.zeros(most, np.int64)
        self.positions = np.zeros(most, np.int64)
        self._addresses = self.tokens.ctypes.data, self.positions.ctypes.data
        self._hidden = torch.empty((most, layers.width), dtype=layers.dtype)
        self._layers, self._reduction = layers, reduction
        self._attention, self._pooling = SpanAttention(library), Pooling(library)

    def __call__(
        self, offsets: Sequence[int], beat: Callable[[], None]
    ) -> tuple[npt.NDArray[np.float32], Sequence[bool]]:
        tokens, queries = offsets[-1], None
        plan = self._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU))
        if self._reduction == "mean":
            counts = [end - begin for begin, end in pairwise(offsets)]
        else:
            read = offsets[:-1] if self._reduction == "cls" else [end - 1 for end in offsets[1:]]
            counts = [1] * len(read)
            asked = self._attention.prepare(SpanBatch(tokens=tokens, offsets=offsets, device=CPU, queries=read))
            assert asked.query_address is not None
            queries = Queries(len(read), asked.query_address, asked)
        means = self._pooling.prepare(self._hidden, counts)
        self._layers.embed(self._hidden, tokens, *self._addresses, plan, queries, beat)
        return means()
