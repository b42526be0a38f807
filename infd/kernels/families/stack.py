"""Decoder layers computed in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.recipe import LayerRecipe


class Stacked(Protocol):
    """Decoder layers, computed in one go."""

    def __call__(self, x: Tensor, batch: LayersBatch) -> tuple[Tensor, Tensor]:
        """Take the embeddings x [T, hidden], which are used up; return what models/decoder.py Block does.

        That is, after the last layer: what is still to be added to the residual stream, and the stream.
        Both [W, hidden] of the tokens that are wanted, where the batch says so.
        """


class LayersBatch(Protocol):
    """What layers read of a step: models/base.py Batch."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def attention(self) -> Sequence[AttentionPlan]: ...
    @property
    def cache(self) -> Sequence[KeyValuePages]: ...
    @property
    def beat(self) -> Callable[[], None]: ...
    @property
    def wanted(self) -> WantedLayers | None: ...


class WantedLayers(Protocol):
    """models/base.py Wanted."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def attention(self) -> AttentionPlan: ...


class Stack(Protocol):
    def build(self, layers: Sequence[LayerRecipe]) -> Stacked | None:
        """Return these layers as one, or None where each is to be computed by its own code."""
