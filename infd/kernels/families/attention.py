"""Paged attention, and the key-value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from msgspec import Struct

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
