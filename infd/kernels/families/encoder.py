"""An encoder's layers in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.span_attention import SpanPlan
    from infd.kernels.recipe import EncoderLayerRecipe


class StackedEncoder(Protocol):
    """An encoder's layers computed in one call."""

    def __call__(self, x: Tensor, positions: Tensor, plan: SpanPlan, beat: Callable[[], None]) -> Tensor:
        """Return the last layer's output [T, hidden] for embeddings x [T, hidden], which are overwritten.

        positions  [T] int64: rows of rotary tables
        beat       called before each layer, or each few layers
        """


class EncoderStack(Protocol):
    """Fuses an encoder's layers into one call."""

    def build(self, layers: Sequence[EncoderLayerRecipe]) -> StackedEncoder | None:
        """Return the layers as one call, or None if the implementation cannot compute all layers."""
