"""Tensors of a checkpoint: stored as such, or encoded in one or more stored tensors.

This module does not import torch, because checkpoints are checked before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from msgspec import Struct

if TYPE_CHECKING:
    from pathlib import Path

    from infd.errors import CheckpointError
    from infd.groups import Groups, InputScheme

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


@runtime_checkable
class Packing(Protocol):
    """An encoding that may consist of integers and scales."""

    def packed(self) -> Groups | str:
        """Return how the integers are stored, or why no form can keep the matrix. Raises CheckpointError."""


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


@runtime_checkable
class QuantizesInputs(Protocol):
    """An encoding whose scheme may quantize the inputs of products."""

    @property
    def inputs(self) -> StoredInputs | None: ...


class Encoding(Protocol):
    """How stored tensors represent a matrix. `encodings/rows.py` computes the matrix's rows.

    label   description for operators, such as "int4, groups of 128"
    shape   of the matrix; all dimensions but the last, flattened, are its rows
    parts   the stored tensors that represent the matrix
    unused  stored tensors of the module that its rows do not need, such as scales of activations
    """

    @property
    def label(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[StoredTensor, ...]: ...
    @property
    def unused(self) -> tuple[StoredTensor, ...]: ...


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
        """See Packing."""
        return self.encoding.packed() if isinstance(self.encoding, Packing) else "its numbers are no integers"

    @property
    def inputs(self) -> StoredInputs | None:
        """Return how inputs of products with the matrix are quantized; None: they are not."""
        return self.encoding.inputs if isinstance(self.encoding, QuantizesInputs) else None

    @property
    def file(self) -> WeightFile:
        return self.encoding.parts[0].file
