"""Tensors of a checkpoint: stored as such, or encoded in one or more stored tensors.

This module does not import torch, because checkpoints are checked before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from pathlib import Path

    from infd.errors import CheckpointError
    from infd.groups import Groups
    from infd.input_scheme import InputScheme

# Matrices are read in multiples of ROWS rows: no form and no encoding packs more rows together.
ROWS: Final = 64


class WeightFile(Protocol):
    """An open file of weights."""

    @property
    def path(self) -> Path: ...
    @property
    def descriptor(self) -> int: ...

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the file's bytes from `offset`. Raises CheckpointError if the file was truncated."""

    def cut_short(self) -> CheckpointError:
        """Return the error for a file that ends before the last byte described by its header."""


class StoredTensor(Struct, frozen=True):
    """A tensor's location in a file. `dtype` is safetensors' name, such as "BF16", or GGUF's, such as "Q4_0"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of the tensor's first byte, from the start of the file
    bytes: int
    file: WeightFile

    @property
    def encoding(self) -> None:
        """None: the tensor is not encoded."""

    @property
    def inputs(self) -> None:
        """None: the tensor is not encoded, so inputs are not quantized."""

    def packed(self) -> None:
        """Return None: the tensor is not encoded."""

    def read(self, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from `start`. Raises CheckpointError if the file was truncated."""
        self.file.read(buffer, self.offset + start)

    def content(self) -> memoryview:
        """Return all bytes of the tensor. Raises CheckpointError if the file was truncated."""
        content = memoryview(bytearray(self.bytes))
        self.read(content)
        return content


class FileRows(NamedTuple):
    """Consecutive rows of a matrix, in consecutive bytes of a file.

    tensor  [n, inputs]; its dtype names the rows' encoding
    head    rows of a head in which the rows of its two halves alternate; 0: rows are in the matrix's order
    """

    tensor: StoredTensor
    head: int = 0


class StoredInputs(Struct, frozen=True):
    """How a checkpoint's scheme quantizes the inputs of products with a matrix.

    scale    one number, by which inputs are divided; None: the scheme computes scales
    zero     one integer; None: 0, or the scheme computes zero points
    inverse  whether inputs are multiplied by the stored scale instead
    """

    scheme: InputScheme
    scale: StoredTensor | None = None
    zero: StoredTensor | None = None
    inverse: bool = False


class Encoding(Protocol):
    """How stored tensors represent a matrix. `encodings/rows.py` computes the matrix's rows.

    label   description for operators, such as "int4, groups of 128"
    shape   of the matrix; all dimensions but the last, flattened, are its rows
    parts   the stored tensors that represent the matrix
    unused  stored tensors of the module that its rows do not need, such as scales of activations
    inputs  how inputs of products with the matrix are quantized; None: they are not
    """

    @property
    def label(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[StoredTensor, ...]: ...
    @property
    def unused(self) -> tuple[StoredTensor, ...]: ...
    @property
    def inputs(self) -> StoredInputs | None: ...

    def packed(self) -> Groups | str:
        """Return how integers and scales are stored, or why no form can keep the matrix. Raises CheckpointError."""

    def rows(self, first: int, count: int) -> FileRows | None:
        """Return rows [first, first + count) of the matrix as native code can read them; None: only Python can."""


class EncodedTensor(Struct, frozen=True):
    """An encoded matrix, represented by one or more stored tensors. `dtype` is the type of the decoded rows."""

    name: str
    encoding: Encoding

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.encoding.shape

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the stored tensors that are read."""
        return sum(part.bytes for part in self.encoding.parts)

    def packed(self) -> Groups | str:
        """See Encoding."""
        return self.encoding.packed()

    @property
    def inputs(self) -> StoredInputs | None:
        """See Encoding."""
        return self.encoding.inputs

    @property
    def file(self) -> WeightFile:
        return self.encoding.parts[0].file
