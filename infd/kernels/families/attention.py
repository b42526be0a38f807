"""Paged attention, and the key-value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.host import Array


FLOAT8 = torch.float8_e4m3fn  # the dtype of fp8 caches


class KeyValuePages(NamedTuple):
    """The cache of one layer: k and v, each [P + 1, K, page_tokens, row], contiguous. Page 0 is scratch.

    A row is one head of one token: D elements, or the implementation's quantized form; see Attention.row.

    scales  [2, K] float32, for fp8 caches: the divisor of keys and the divisor of values, by head. A write divides by
            the scale and clamps, a read multiplies by the scale; None: unscaled
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None


class AttentionBatch(Struct, kw_only=True):
    """The spans of a step, for one page group.

    Span i is tokens offsets[i]:offsets[i + 1] of the packed step, at positions from start[i] on; table[i] lists the
    pages of the span's sequence. `starts` contains the host's upper bounds of `start`, for grids and shapes. Tokens
    from offsets[-1] on are padding: their keys and values are written to page 0, and their output is ignored.
    """

    page_tokens: int
    window: int | None  # tokens to which a query attends, its own included; None: all
    starts: list[int]  # [S]
    counts: list[int]  # [S]
    offsets: list[int]  # [S + 1]
    start: Tensor  # [S] int32
    table: Tensor  # [S, pages] int32, by page index; 0: no page
    slots: Tensor  # [T] int64: page * page_tokens + offset of each token's k and v; padding: page 0
    upload: Callable[[Array], Tensor] | None = None  # copies a kernel's host tables to the device

    def up(self, array: Array) -> Tensor:
        """Copy an array computed on the host for this step to the device of `table`."""
        if self.upload is not None:
            return self.upload(array)
        return torch.from_numpy(array).to(self.table.device, non_blocking=True)


def in_chunks(batch: AttentionBatch, chunk: int) -> AttentionBatch:
    """Confine attention to chunks of `chunk` tokens, a multiple of page_tokens; batch.window must be None.

    A chunk is like a sequence of its own: spans are divided where chunks begin, and the parts' positions and tables
    begin with their chunks.
    """
    size = batch.page_tokens
    assert batch.window is None
    assert chunk % size == 0
    parts = [
        (span, begin, min(begin - begin % chunk + chunk, start + count) - begin)
        for span, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True))
        for begin in (start, *range(start - start % chunk + chunk, start + count, chunk))
    ]
    counts = [count for _, _, count in parts]
    # Of each part: its span, the tokens from the span's start to the part's, and the tokens before its chunk.
    source = np.array([(span, begin - batch.starts[span], begin - begin % chunk) for span, begin, _ in parts])
    span, ahead, before = batch.up(np.ascontiguousarray(source.T, dtype=np.int64)).unbind()
    pages = before[:, None] // size + torch.arange(min(chunk // size, batch.table.shape[1]), device=span.device)
    return replace(
        batch,
        starts=[begin % chunk for _, begin, _ in parts],
        counts=counts,
        offsets=[0, *np.cumsum(counts).tolist()],
        start=(batch.start[span] + ahead - before).clamp(min=0).to(torch.int32),
        table=batch.table[span].gather(1, pages.clamp(max=batch.table.shape[1] - 1)),
    )


class AttentionPlan(Protocol):
    """A step's attention over one page group, prepared by an implementation."""

    @property
    def slots(self) -> Tensor:
        """See AttentionBatch.slots."""

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        """Write k and v, each [T, K, D], to the cache, at `slots`."""

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend every query token to the cached keys of its own sequence, up to its own position.

        q        [T, H, D]
        scale    multiplies q·k before softmax, usually D ** -0.5
        softcap  bounds the scaled scores: softcap * tanh(score / softcap)
        sinks    [H] float32: score of an extra key without a value, so that attention weights sum to less than 1
        ->       [T, H, D] in q's dtype, accumulated in float32; rows of padding are finite, otherwise arbitrary
        """


class CapturedPlan(AttentionPlan, Protocol):
    """A plan for captured steps: its batch's tensors are refilled before each replay.

    Kernels read lengths from tensors alone; the batch's lists are upper bounds for every step.
    """

    def refill(self, starts: list[int]) -> None:
        """Set the host's upper bounds of `start` for the next replay. Called before the replay, not in the graph."""

    def begin(self) -> None:
        """Run the work that all layers share, once the batch is filled; captured with the layers.

        The first step is not captured: it records which work the layers share.
        """


class Attention(Protocol):
    """Paged attention: `prepare` once per step and group, `run` once per layer."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the length and dtype of a cache row, for heads of `size` elements of `dtype`."""

    def prepare(self, batch: AttentionBatch) -> AttentionPlan:
        """Prepare one step for one page group."""

    def captured(self, batch: AttentionBatch) -> CapturedPlan | None:
        """Prepare captured steps of one size; None if the implementation cannot be captured."""
