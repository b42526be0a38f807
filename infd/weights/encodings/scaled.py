"""Matrices of numbers of few bits, with a scale for each block of rows and inputs.

    weight[output, input] = (number - zero point) * scale

Most formats store such matrices, and differ in the arrangement of numbers, zero points and scales. Numbers and zero
points are whole bytes or bit fields of words. This module does not import torch; `rows.py` computes rows with torch.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from infd.groups import Groups

if TYPE_CHECKING:
    from infd.weights.stored import StoredInputs, StoredTensor

NumberType = Literal["uint", "int", "e2m1", "e4m3", "e5m2"]


class Numbers(Struct, frozen=True, kw_only=True):
    """Numbers of `bits` bits, packed in the words of a stored matrix.

    By default, consecutive inputs of a row are in ascending bits of a word, then in the next word.

    type         how bits are read: "uint", unsigned minus `offset`; "int", two's complement; else a float
    turned       whether the stored matrix is transposed: [inputs, rows]; for zero points [groups of inputs, rows]
    across       whether a word holds numbers of consecutive rows at one input
    interleaved  whether the eight numbers of a word begin at bits 0, 16, 4, 20, 8, 24, 12 and 28; only if `across`
    added        integer added to each whole word before unpacking; carries between numbers are intended
    """

    stored: StoredTensor
    type: NumberType
    bits: int = 8
    offset: int = 0
    turned: bool = False
    across: bool = False
    interleaved: bool = False
    added: int = 0


class Scales(Struct, frozen=True, kw_only=True):
    """A scale for each block of [rows, inputs].

    grid      (blocks of rows, blocks of inputs)
    block     rows and inputs of a block; the last blocks of a matrix may be smaller
    exponent  whether a scale is a biased exponent: 2 ** (stored - 127)
    turned    whether the stored matrix is transposed: [blocks of inputs, blocks of rows]
    overall   one number for the matrix, by which each scale is multiplied; if `divides`, divided
    factor    multiplies each weight, after the scale
    """

    stored: StoredTensor
    grid: tuple[int, int]
    block: tuple[int, int]
    exponent: bool = False
    turned: bool = False
    overall: StoredTensor | None = None
    divides: bool = False
    factor: float = 1.0


class Scaled(Struct, frozen=True, kw_only=True):
    """A matrix of scaled numbers. Implements `Encoding`.

    zeros    zero points, one for each block of `scales`
    groups   the group of each input; None: groups consist of consecutive inputs
    columns  one factor for each input, applied after the scale
    inputs   how inputs of products are quantized; None: they are not
    unused   see `Encoding`
    """

    label: str
    shape: tuple[int, ...]
    numbers: Numbers
    scales: Scales
    zeros: Numbers | None = None
    groups: StoredTensor | None = None
    columns: StoredTensor | None = None
    inputs: StoredInputs | None = None
    unused: tuple[StoredTensor, ...] = ()

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        zeros = None if self.zeros is None else self.zeros.stored
        parts = (self.numbers.stored, self.scales.stored, self.scales.overall, zeros, self.groups, self.columns)
        return tuple(part for part in parts if part is not None)

    def packed(self) -> Groups | str:
        """See `Encoding`."""
        numbers, scales = self.numbers, self.scales
        if numbers.type not in ("uint", "int", "e2m1", "e4m3"):
            return f"its numbers are {numbers.type}"
        if self.columns is not None or scales.factor != 1:
            return "its weights have a second scale"
        if numbers.type == "e2m1":  # powers of two are exact in bfloat16
            kind = "BF16" if scales.exponent and scales.overall is None else "F32"
            return Groups(4, scales.block[1], kind, table="e2m1")
        if numbers.type == "e4m3":
            return Groups(8, scales.block[1], "F32", table="e4m3")
        if scales.overall is not None:
            return "its weights have a second scale"
        if scales.exponent:
            return f"its scales are {scales.stored.dtype}"
        if self.zeros is None and shift(numbers):
            return "its integers are unsigned"
        order = ""
        if self.groups is not None:
            content = self.groups.content()
            sizes = sorted(Counter(content.cast("i")).items())
            if any(count != scales.block[1] for _, count in sizes[:-1]) or len(sizes) != scales.grid[1]:
                return "its groups differ in size"
            order = blake2b(content, digest_size=16).hexdigest()
        return Groups(numbers.bits, scales.block[1], scales.stored.dtype, self.zeros is not None, order)

    def rows(self, first: int, count: int) -> None:
        """Return None: a row's numbers and scales are in several tensors."""


def shift(numbers: Numbers) -> int:
    """Return the number to subtract from decoded integers so that they range from -2^(bits-1) to 2^(bits-1) - 1."""
    return (1 << numbers.bits - 1) - numbers.offset if numbers.type == "uint" else 0
