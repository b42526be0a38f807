"""Matrices of small numbers, multiplied by a scale for each group: what most formats are, in other arrangements.

    weight[output, input] = (number - zero point) * scale

Numbers and zero points are bit fields in stored words, or bytes; a group is a block of rows and inputs. Nothing here
imports torch until rows are computed (`rows.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from infd.weights.stored import StoredTensor

NumberType = Literal["uint", "int", "e2m1", "e4m3", "e5m2"]


class Numbers(Struct, frozen=True, kw_only=True):
    """Numbers of `bits` bits in the words of a stored matrix, consecutive inputs in ascending bits of ascending words.

    type         "uint" field minus `offset`; "int" two's complement; e2m1 and the 8-bit floats
    turned       the stored matrix has its rows along the inputs (of zero points: along the groups of inputs)
    across       a word holds numbers of consecutive rows, of one input
    interleaved  the eight numbers of a word are in bits 0, 16, 4, 20, 8, 24, 12 and 28; only if `across`
    added        added to each word before it is unpacked, without regard to its fields
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
    turned    the stored matrix has a row for each block of inputs
    overall   one number for the matrix, which multiplies each scale, or divides it if `divides`
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

    zeros    zero points by the blocks of `scales`
    groups   the group of each input; None: groups are consecutive inputs
    columns  one factor for each input, after the scale
    unused   see `Encoding`
    """

    label: str
    shape: tuple[int, ...]
    numbers: Numbers
    scales: Scales
    zeros: Numbers | None = None
    groups: StoredTensor | None = None
    columns: StoredTensor | None = None
    unused: tuple[StoredTensor, ...] = ()

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        zeros = None if self.zeros is None else self.zeros.stored
        parts = (self.numbers.stored, self.scales.stored, self.scales.overall, zeros, self.groups, self.columns)
        return tuple(part for part in parts if part is not None)
