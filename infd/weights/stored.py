"""Tensors of a checkpoint: as they are stored, or encoded in several stored tensors.

Imports no torch: headers are checked before it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from pathlib import Path

    from infd.errors import CheckpointError

ROWS: Final = 64  # matrices are read in multiples of ROWS rows; no form and no encoding packs rows in larger blocks


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
    """A tensor's location in a file. `dtype` is safetensors' name, such as "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # offset of the first byte in the file
    bytes: int
    file: WeightFile

    def read(self, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from offset `start`. Raises CheckpointError if truncated."""
        self.file.read(buffer, self.offset + start)

    def content(self) -> memoryview:
        """Return all bytes of the tensor. Raises CheckpointError if truncated."""
        content = memoryview(bytearray(self.bytes))
        self.read(content)
        return content


class Encoding(Protocol):
    """How stored tensors make a matrix. `encodings/rows.py` computes its rows.

    label   for operators, such as "int4, groups of 128"
    shape   of the matrix; its rows are all but the last dimension, flattened
    parts   the stored tensors that make the matrix
    unused  stored tensors of the module that infd does not read, such as scales of activations
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
    """A matrix that several stored tensors make. Its rows are read as float32."""

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
        """Return the bytes that are read."""
        return sum(part.bytes for part in self.encoding.parts)

    @property
    def file(self) -> WeightFile:
        return self.encoding.parts[0].file
