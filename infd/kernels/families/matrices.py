"""Weight matrices: their stored forms, and products with them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import GroupedRows, Groups
    from infd.input_scheme import InputScheme


LEAST_ROWS: Final = 4  # a row of a product by torch may round differently if the product has fewer rows


class Packing(NamedTuple):
    """A native function that stores rows [n, inputs] of one dtype in a matrix from row `first` on, like `Form.place`.

    Rows of GGUF's blocks are stored like by `Grouped.place_groups`.

    pack   address of the function, which takes (place, outputs, inputs, rows, first, n), on several threads at
           once
    place  address of the matrix [outputs, inputs]
    step   number of rows packed together: calls are fastest if `first` is a multiple of `step`
    """

    pack: int
    place: int
    outputs: int
    inputs: int
    step: int


@runtime_checkable
class Packable(Protocol):
    """A form whose rows native code can store."""

    def packing(self, storage: Tensor, dtype: torch.dtype | str) -> Packing | None:
        """Return the packing of rows of `dtype`; None: rows of this dtype must be stored by `Form.place`.

        dtype  a string: the rows are GGUF's blocks of this type, with the groups of the form
        """


SCALE_TYPES: Final = MappingProxyType(
    {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8}
)


@runtime_checkable
class Grouped(Protocol):
    """A form that can store a checkpoint's quantized values and scales unchanged, if their format is `groups`."""

    @property
    def groups(self) -> Groups: ...

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        """Store rows from `first` on. rows: scales have the dtype of `groups`; all rows have the same order."""


class Form(Protocol):
    """The stored form of a weight matrix [out, in], and products with it.

    shape, dtype  of `storage`, the tensor that stores the matrix; its elements are arbitrary until `place` stores rows
    least_rows    in products of at least this many rows, a row does not depend on the number of rows; see LEAST_ROWS
    wide          dtype of `wide` products: float32, or the activations' dtype if float32 needs a separate conversion
    quantizes     how products quantize their inputs, whatever the checkpoint's scheme; None: they do not
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def least_rows(self) -> int: ...
    @property
    def wide(self) -> torch.dtype: ...
    @property
    def quantizes(self) -> InputScheme | None: ...

    def rows(self, storage: Tensor, first: int, count: int) -> Tensor | None:
        """Return the view of `storage` that stores checkpoint rows [count, in] unchanged; None: use `place`."""

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        """Store checkpoint rows [n, in], floating-point and contiguous, as the matrix's rows from `first` on."""

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        """Return x [T, in] times the matrix transposed, plus bias: [T, out] in x's dtype, or `self.wide` if `wide`."""

    def look_up(self, tokens: Tensor, storage: Tensor) -> Tensor:
        """Return the matrix's rows with the indices tokens [T] int64: [T, in] in the activations' dtype."""


class Matrices(Protocol):
    """The forms of one family: `linear` and `encoder_linear`, the layers' weights of decoders and of encoders;
    `vocabulary`, the embedding and the head.

    numbers  to which the forms quantize weights: bits and table, as in Groups; None: the forms do not quantize
    """

    @property
    def numbers(self) -> tuple[int, str] | None: ...

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Form:
        """Return the form of a matrix [outputs, inputs] for activations of `dtype`."""


class Packed(Protocol):
    """The family `packed`: forms of matrices that a checkpoint stores as integers and scales."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> Form | str:
        """Return a form, which is `Grouped`, that stores a matrix unchanged; or the reason that there is none.

        dtype   of activations
        groups  of the checkpoint's matrix; a group of the form may be a part of a group of the checkpoint
        """
