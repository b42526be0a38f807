"""The sublayers of a decoder layer (attention, feed-forward), and transforms of their outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from msgspec.structs import replace

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.recipe import AttentionRecipe, ExpertsRecipe, GatedRecipe, NormRecipe
    from infd.models.base import Batch

R_co = TypeVar("R_co", bound="AttentionRecipe | GatedRecipe | ExpertsRecipe", covariant=True)


class Sublayer(Protocol[R_co]):
    """Attention or the feed-forward network."""

    def __call__(self, x: Tensor, batch: Batch, /) -> Tensor: ...

    def recipe(self) -> R_co | None:
        """Return the sublayer as a recipe, or None if a recipe cannot express the sublayer."""


class OutputTransform(Protocol):
    """A transform of a sublayer's output before the residual addition: a norm or a factor."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def recipe(self) -> NormRecipe | float: ...


class Transformed(Generic[R_co]):
    """A sublayer followed by an output transform."""

    def __init__(self, sublayer: Sublayer[R_co], transform: OutputTransform) -> None:
        self._sublayer: Sublayer[R_co] = sublayer
        self._transform = transform

    def __call__(self, x: Tensor, batch: Batch, /) -> Tensor:
        return self._transform(self._sublayer(x, batch))

    def recipe(self) -> R_co | None:
        recipe = self._sublayer.recipe()
        return None if recipe is None else replace(recipe, output_transform=self._transform.recipe())


class Multiplier:
    """An output transform that multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._factor

    def recipe(self) -> float:
        return self._factor
