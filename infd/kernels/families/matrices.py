"""Weight matrices: how they are kept, and products with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


LEAST_ROWS: Final = 4  # below as many, torch's matrix products take another path


class Form(Protocol):
    """How one weight matrix [out, in] is kept, and what is computed of it.

    shape, dtype  of `kept`, the one tensor that holds it. Only the form knows what its numbers mean;
                  what is never placed may hold anything.
    least_rows    a row of a product may differ in its last bits where there are fewer; see LEAST_ROWS
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def least_rows(self) -> int: ...

    def rows(self, kept: Tensor, first: int, count: int) -> Tensor | None:
        """Return the part of `kept` that holds these rows as a checkpoint does, [count, in], or None."""

    def place(self, kept: Tensor, first: int, rows: Tensor) -> None:
        """Make [n, in], floating-point and contiguous, the matrix's rows from `first` on."""

    def multiply(self, x: Tensor, kept: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        """Return x [T, in] times the matrix, transposed, plus bias: [T, out] in x's dtype, or float32 if `wide`."""

    def look_up(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Return the rows for tokens [T] int64: [T, in] in the dtype of activations."""


class Matrices(Protocol):
    """The forms of one family: `linear`, the weights of layers; `vocabulary`, the embedding and the head."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Form:
        """Return the form of a matrix [outputs, inputs] for activations of `dtype`."""
