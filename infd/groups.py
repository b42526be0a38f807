"""Integers of a quantized matrix with scales for groups of them, as checkpoints store and as kernels keep them."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

BLOCK: Final = 256  # inputs that share a float16 if scales are I8
WIDE_TABLES: Final = ("iq4_nl",)  # with entries that exceed six bits


class Groups(NamedTuple):
    """A matrix of integers of `bits` bits, with a scale for each group of `inputs` inputs of a row.

    inputs  of a group; if not less than the matrix's inputs, each row has one scale
    scales  dtype of the scales: safetensors' name, such as "BF16"; "I8": to be multiplied by a float16 for each BLOCK
    zeros   whether a group also has an integer zero point, which is subtracted from its integers
    order   digest of the group of each input; "": groups consist of consecutive inputs
    table   name of the table of numbers that the integers index; "": the integers are the numbers
    minima  whether a group also has a minimum of the scales' dtype, which is added to its scaled integers
    """

    bits: int
    inputs: int
    scales: str
    zeros: bool = False
    order: str = ""
    table: str = ""
    minima: bool = False


def common(kinds: Collection[Groups]) -> Groups | None:
    """Return groups that represent matrices of all `kinds` exactly; None if infd has none.

    Kinds that differ become six bits, unless all are integers of four bits without minima, or one needs eight bits. Six
    bits also represent the table of fp4, eight bits every table of int8.
    """
    if len(set(kinds)) == 1:
        return next(iter(kinds))
    if any(kind.order for kind in kinds) or any(kind.bits not in (4, 6, 8) or kind.table == "e4m3" for kind in kinds):
        return None
    numbers = {(kind.bits, kind.table, kind.minima) for kind in kinds}
    scales = {kind.scales for kind in kinds}
    if numbers == {(4, "", False)}:
        bits = 4
    else:
        bits = 8 if any(kind.bits == 8 or kind.table in WIDE_TABLES for kind in kinds) else 6
    return Groups(
        bits,
        gcd(*(kind.inputs for kind in kinds)),
        scales.pop() if len(scales) == 1 else "F32",  # which represents the products of int8 and float16 too
        zeros=any(kind.zeros for kind in kinds),
        minima=any(kind.minima for kind in kinds),
    )


class GroupedRows(NamedTuple):
    """Some rows of such a matrix, not decoded.

    integers  [n, in] int8, from -2^(bits-1) to 2^(bits-1) - 1; with a table: its indices, minus 2^(bits-1); with
              minima and 4 bits: from 0 to 15
    scales    [n, groups]; halved for fp4, because the table contains the numbers of fp4 doubled
    zeros     [n, groups] int8: zero points; None: all are 0
    order     [in] int64: the index of the input that each column multiplies; None: columns are in the inputs' order
    minima    [n, groups]; None: all are 0
    shared    [n, blocks] float16, by which I8 scales are multiplied; with minima [n, 2 * blocks]: two numbers of a
              block, for scales and for minima
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    minima: Tensor | None = None
    shared: Tensor | None = None
