"""Inputs of products, rounded as a checkpoint's scheme quantizes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from infd.input_scheme import InputScheme
    from infd.kernels.families.matrices import Form


class Inputs(Protocol):
    """The family `inputs`."""

    def why_not(self, scheme: InputScheme) -> str:
        """Return why inputs are not rounded by this scheme; "" if they are."""

    def round(self, x: Tensor, scheme: InputScheme, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        """Return x [T, in], quantized and decoded again, in x's dtype.

        scale  [1] float32, by which all inputs are divided; None: the scheme computes scales
        zero   [1] float32, the integer that represents 0; None: 0, or the scheme computes zero points
        """


class Rounding(NamedTuple):
    """The arguments of `Inputs.round` for one matrix; the tensors keep their addresses."""

    kernel: Inputs
    scheme: InputScheme
    scale: Tensor | None
    zero: Tensor | None


@runtime_checkable
class RoundsInputs(Protocol):
    """Matrices whose products round their inputs by a scheme of their own, without a checkpoint's."""

    @property
    def rounds(self) -> InputScheme: ...


@runtime_checkable
class QuantizesStored(Protocol):
    """A form that can quantize inputs by a checkpoint's scheme, with the stored scale if there is one.

    For a scheme that no form can apply, a form that quantizes inputs differently (`Form.quantizes`) is not used, and
    products of other forms round their inputs first (`Inputs.round`).
    """

    def stored(self, rounding: Rounding) -> Form | str:
        """Return the form that quantizes by `rounding`, whose tensors must outlive it, or why there is none."""
