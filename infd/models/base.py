"""What every model offers, and what its forward pass reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from msgspec import Struct
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.models.parameter import Parameter, Target
    from infd.scheduler.layout import CacheLayout


class Adapted(Protocol):
    """Which tokens of a pass want an adapter, and what each adapter holds. There is none where no token does."""

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        """Add to rows of y [T, outputs] what their adapters make of the same rows of x [T, inputs], in place."""

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        """Add to rows of y [T, outputs] what their adapters' tables hold for tokens [T] int64, in place."""


def _unwatched() -> None:
    """Do what a beat does where nobody counts."""


class Batch(Struct, kw_only=True):
    """One forward pass: T tokens, packed span after span, padded to the model's least_rows.

    The runner builds it (`runner/batch.py`); it is declared here because the
    models decide what it holds.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: in the tables of rotary angles
    attention: Sequence[AttentionPlan]  # by page group
    cache: Sequence[KeyValuePages]  # by layer
    beat: Callable[[], None] = _unwatched  # to be called between layers: it counts, and raises where work must end
    adapters: Adapted | None = None
    wanted: Wanted | None = None  # the tokens whose hidden states are wanted; all, where it is None
    # Where angles depend on the length of a prompt, [T] int64: of each token's prompt; 0 where by position alone.
    prompts: Tensor | None = None
    angles: Sequence[Tensor] | None = None  # by rope, tables of this pass in place of the model's; see `layers/rope.py`


class Wanted(Struct):
    """Some tokens of a pass, W of them, that the last layer goes on with.

    That layer puts the keys and values of all tokens into the cache. Whatever else it computes is read by nobody but
    the head.
    """

    tokens: Tensor  # [W] int64: which, ascending; the last one repeated where products need more rows
    attention: AttentionPlan  # of the last layer's page group, with each of them a span of its own
    adapters: Adapted | None = None


class PageTensor(Struct, frozen=True):
    """One named tensor in a slot of a page: what one layer keeps of the page's tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Model(Protocol):
    """One architecture. Its parameters have no storage until weights are loaded.

    least_rows  in fewer tokens, or rows of logits, numbers may differ in their last bits from what they are in more
    narrows     whether the last layer can go on with some tokens alone; if not, batches say of none that it is wanted
    """

    vocab_size: int
    least_rows: int
    narrows: bool

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All tensors that a checkpoint fills, in order of use; tied ones once."""

    @property
    def unread(self) -> Container[str]:
        """Names of tensors that a checkpoint may hold and that this model has no use for."""

    @property
    def targets(self) -> Sequence[Target]:
        """All that adapters may add to, in order of use; none where the model takes no adapters."""

    @property
    def cache_scales(self) -> Mapping[int, Parameter]:
        """By layer, what a cache of 8-bit floats is divided by, [2, K] float32; nothing where that is 1."""

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        """Return which layers keep which tokens."""

    def page_tensors(self, page_tokens: int) -> Sequence[PageTensor]:
        """Return what one slot of a page holds, the same for every layer.

        A page has as many slots as its largest group has layers; the i-th layer
        of each group uses slot i. Pages of a smaller group leave the slots
        behind its last layer unused, which is the price of one pool for all.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states after the last norm: [W, hidden] where some are wanted, and else [T, hidden]."""

    def logits(self, hidden: Tensor, adapters: Adapted | None = None) -> Tensor:
        """Return float32 logits [N, vocab] of hidden [N, hidden]; `adapters` are those of these rows."""
