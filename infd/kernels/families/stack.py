"""Several decoder layers in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.recipe import LayerRecipe


class Stacked(Protocol):
    """Decoder layers computed in one call."""

    def __call__(self, x: Tensor, batch: LayersBatch) -> tuple[Tensor, Tensor]:
        """Run all layers on the embeddings x [T, hidden], which are overwritten.

        Returns (the pending addition, the residual stream) after the last layer, as models/decoder.py Block does: each
        [T, hidden], or [sampled tokens, hidden] if `batch.sampled` is set.
        """


class LayersBatch(Protocol):
    """The fields of models/base.py Batch that layers read."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def attention(self) -> Sequence[AttentionPlan]: ...
    @property
    def cache(self) -> Sequence[KeyValuePages]: ...
    @property
    def beat(self) -> Callable[[], None]: ...
    @property
    def sampled(self) -> SampledLayers | None: ...
    @property
    def routes(self) -> Tensor | None: ...


class SampledLayers(Protocol):
    """The fields of models/base.py SampledBatch that layers read."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def attention(self) -> AttentionPlan: ...


class Stack(Protocol):
    """Fuses decoder layers into one call."""

    def build(self, layers: Sequence[LayerRecipe]) -> Stacked | None:
        """Return the layers as one call, or None if the implementation cannot compute all layers."""
