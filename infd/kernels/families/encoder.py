"""An encoder's layers in one call, and its embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.span_attention import SpanPlan
    from infd.kernels.recipe import EncoderLayerRecipe, LayerNormRecipe


class TableRows(NamedTuple):
    """Rows of a table of embeddings, one for each token.

    table  [N, hidden]
    rows   [T] int64; None: row 0 for every token
    """

    table: Tensor
    rows: Tensor | None


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

    def embed(self, parts: Sequence[TableRows], norm: LayerNormRecipe | None) -> Tensor | None:
        """Return the sum of rows of tables, normed, [T, hidden] in the tables' dtype; None if it is not computed.

        parts  at least one; the first has a row for each token. Each addition is rounded. A row out of range is NaN
        """
