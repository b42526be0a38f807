"""What a branch of a layer passes through before it is added to the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from msgspec.structs import replace

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.recipe import AttentionRecipe, GatedRecipe, NormRecipe
    from infd.models.base import Adapted, Batch

R_co = TypeVar("R_co", bound="AttentionRecipe | GatedRecipe", covariant=True)
Read_contra = TypeVar("Read_contra", bound="Batch | Adapted | None", contravariant=True)


class Branch(Protocol[R_co, Read_contra]):
    """Attention, which reads a batch, or the feed-forward part, which reads what adapters there are."""

    def __call__(self, x: Tensor, read: Read_contra, /) -> Tensor: ...

    def recipe(self) -> R_co | None:
        """Return what it computes, told as data, or None where there are no words for it."""


class Last(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def recipe(self) -> NormRecipe | float: ...


class Then(Generic[R_co, Read_contra]):
    """A branch with one more step at its end, such as a norm."""

    def __init__(self, branch: Branch[R_co, Read_contra], last: Last) -> None:
        self._branch: Branch[R_co, Read_contra] = branch
        self._last = last

    def __call__(self, x: Tensor, read: Read_contra, /) -> Tensor:
        return self._last(self._branch(x, read))

    def recipe(self) -> R_co | None:
        told = self._branch.recipe()
        return None if told is None else replace(told, last=self._last.recipe())


class Times:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self._factor

    def recipe(self) -> float:
        return self._factor
