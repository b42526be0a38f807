"""Paged attention, and the cache that it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.host import Array


FLOAT8 = torch.float8_e4m3fn  # of the types of 8-bit floats, the one that caches hold


class KeyValuePages(NamedTuple):
    """The cache of one layer: k and v, each [P + 1, K, page_tokens, row], contiguous. Page 0 is scratch.

    What a row is the attention family says: the D numbers of a head, as they are, or in fewer bits.

    scales  [2, K] float32, of a cache of 8-bit floats: by what keys, and values, of each head are divided when they are
            written, bounded by what the type can hold, and multiplied when they are read; None: by nothing
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None


class AttentionBatch(Struct, kw_only=True):
    """Which cached tokens each span of a step attends to, for one page group.

    Span i owns tokens offsets[i]:offsets[i + 1] of the packed step, at positions
    starts[i] and up; its sequence's pages stand in table[i]. The lists are the
    host's upper bounds, for grids and shapes; the tensors are the truth. Tokens
    behind offsets[-1] are padding: they write nowhere that counts, and their
    output is ignored.
    """

    page_tokens: int
    window: int | None  # how many tokens a query sees, itself included
    starts: list[int]  # [S]
    counts: list[int]  # [S]
    offsets: list[int]  # [S + 1]
    start: Tensor  # [S] int32
    table: Tensor  # [S, pages] int32, by page index; 0 where there is none
    slots: Tensor  # [T] int64: page * page_tokens + offset where each token's k and v go; padding goes to page 0
    upload: Callable[[Array], Tensor] | None = None  # copies to the device what a kernel's host side works out

    def up(self, array: Array) -> Tensor:
        """Copy what was worked out for this step to where its tensors are."""
        if self.upload is not None:
            return self.upload(array)
        return torch.from_numpy(array).to(self.table.device, non_blocking=True)


class AttentionPlan(Protocol):
    """What a family prepared for one step and one page group."""

    @property
    def slots(self) -> Tensor:
        """AttentionBatch's."""

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        """Put k and v, each [T, K, D], into the cache."""

    def run(
        self,
        q: Tensor,
        pages: KeyValuePages,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend every query token to the cached keys of its own sequence, at its own position and before.

        q        [T, H, D]
        scale    multiplies q·k before softmax, usually D ** -0.5
        softcap  bounds the scaled scores: softcap * tanh(score / softcap)
        sinks    [H] float32: the score that each head gives to nothing, so that weights add up to less than 1
        ->       [T, H, D] in q's dtype, accumulated in float32; rows of padding hold anything finite
        """


class LastingPlan(AttentionPlan, Protocol):
    """A plan whose batch's tensors are filled anew before each step, so that a captured step can be replayed.

    It takes no number from them but on the device. The batch's lists are bounds that every step keeps to.
    """

    def refill(self, starts: list[int]) -> None:
        """Be told the host's bounds for the next step, outside what is captured, and before that is replayed."""

    def begin(self) -> None:
        """Issue what the layers of a step share, once its batch is filled; this is captured with them.

        What that is, the first step finds out, layer by layer; so it is not captured.
        """


class Attention(Protocol):
    """Paged attention: `prepare` once per step and group, `run` once per layer."""

    def row(self, size: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return how many numbers of which type hold a head of `size` numbers of `dtype` in the cache."""

    def prepare(self, batch: AttentionBatch) -> AttentionPlan: ...

    def lasting(self, batch: AttentionBatch) -> LastingPlan | None:
        """Prepare for many steps of one size; None where what is prepared depends on the step."""
