"""What every model offers, and what its forward pass reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.ops import AttentionPlan, KeyValuePages
    from infd.scheduler.layout import CacheLayout


class Batch(Struct, kw_only=True):
    """One forward pass: T tokens, packed span after span, padded to at least 4.

    The runner builds it (`runner/batch.py`); it is declared here because the
    models decide what it holds.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: Sequence[AttentionPlan]  # by page group
    cache: Sequence[KeyValuePages]  # by layer


class Model(Protocol):
    """One architecture, its weights loaded."""

    vocab_size: int

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        """Return which layers keep which tokens."""

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, hidden] after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, vocab] of hidden [N, hidden]."""
