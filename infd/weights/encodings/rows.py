"""Compute rows of encoded matrices, in float32.

The encodings' own modules do not import torch, because checkpoints are checked before it is imported. So the functions
of each encoding are here, in integers.py and in blocks.py.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from infd.rounding import ceil_div
from infd.weights.encodings.bitsandbytes import Flat
from infd.weights.encodings.blocks import block_rows
from infd.weights.encodings.gguf import Blocks
from infd.weights.encodings.scaled import Scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.weights.encodings.scaled import Numbers, Scales
    from infd.weights.stored import Encoding, StoredTensor

    # A function of (first, count) that returns rows [first, first + count) of a matrix, float32 [count, inputs].
    # `first` must be a multiple of ROWS in stored.py.
    Rows = Callable[[int, int], Tensor]

DTYPES = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.uint8,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I32": torch.int32,
        "I64": torch.int64,
    }
)
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INTERLEAVED: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rows_of(encoding: Encoding) -> Rows:
    """Read the stored tensors of a matrix; return a function that computes the rows. Raises CheckpointError."""
    match encoding:
        case Scaled():
            return scaled_rows(encoding)
        case Flat():
            return flat_rows(encoding)
        case Blocks():
            return block_rows(encoding)
        case _:
            raise TypeError(encoding)


def read(stored: StoredTensor) -> Tensor:
    """Read a stored tensor. Raises CheckpointError if the file was truncated."""
    content = torch.empty(stored.bytes, dtype=torch.uint8)
    stored.read(content.numpy().data)
    return content.view(DTYPES[stored.dtype]).view(stored.shape)


def scaled_rows(encoding: Scaled) -> Rows:
    """See `rows_of`."""
    numbers, scales, inputs = encoding.numbers, encoding.scales, encoding.shape[-1]
    words = read(numbers.stored)
    if words.dim() > 2:
        words = words.view(prod(encoding.shape[:-1]), -1)
    scale = scales_of(scales)
    zero = None if encoding.zeros is None else unpack_zeros(encoding.zeros, scales)
    group_of = torch.arange(inputs) // scales.block[1]
    if encoding.groups is not None:
        group_of = read(encoding.groups).long()
    columns = None if encoding.columns is None else read(encoding.columns).float()

    def rows(first: int, count: int) -> Tensor:
        values = unpack(numbers, words, first, count, inputs)
        blocks = torch.arange(first, first + count) // scales.block[0]
        if zero is not None:
            values -= spread(zero, blocks, group_of, scales.block[1], encoding.groups is not None)
        values *= spread(scale, blocks, group_of, scales.block[1], encoding.groups is not None)
        if scales.factor != 1:
            values *= scales.factor
        return values if columns is None else values.mul_(columns)

    return rows


def unpack_zeros(zeros: Numbers, scales: Scales) -> Tensor:
    """Read the zero points of a matrix, float32 [blocks of rows, blocks of inputs]. Raises CheckpointError."""
    words = read(zeros.stored)
    return unpack(zeros, words if words.dim() == 2 else words.view(scales.grid), 0, *scales.grid)


def spread(blocks: Tensor, row_block: Tensor, group_of: Tensor, width: int, scattered: bool) -> Tensor:
    """Return the value of each weight's block, for some rows: [rows, inputs], or [rows, 1] with one group of inputs.

    blocks     values, [blocks of rows, groups of inputs]
    row_block  [rows] the block of each row
    group_of   [inputs] the group of each input
    width      consecutive inputs in a group; ignored if `scattered`
    scattered  whether `group_of` is arbitrary
    """
    chosen = blocks[row_block]
    if chosen.shape[1] == 1:
        return chosen
    if scattered:
        return chosen[:, group_of]
    return chosen.repeat_interleave(width, dim=1)[:, : len(group_of)]


def unpack(numbers: Numbers, words: Tensor, first: int, count: int, inputs: int) -> Tensor:
    """Return rows [first, first + count) of a packed matrix, as float32 [count, inputs]; see `fields_of`."""
    fields = fields_of(numbers, words, first, count, inputs)
    match numbers.type:
        case "e4m3" | "e5m2":
            return fields.view(_FLOAT8[numbers.type]).float()
        case "e2m1":
            return torch.tensor([*E2M1, *(-value for value in E2M1)])[fields.int()]
        case "int":
            half = 1 << (numbers.bits - 1)
            return ((fields.to(torch.int16) ^ half) - half).float()
        case "uint":
            return fields.float().sub_(numbers.offset)


def fields_of(numbers: Numbers, words: Tensor, first: int, count: int, inputs: int) -> Tensor:
    """Return rows [first, first + count) of a packed matrix as the numbers' bits, uint8 [count, inputs].

    words  the stored matrix
    first  if a word contains numbers of several rows: a row whose numbers begin a word
    """
    begin, end = first, first + count
    if numbers.across:
        size = words.element_size() * 8
        begin, end = begin * numbers.bits // size, ceil_div(end * numbers.bits, size)
    words = words[:, begin:end].T.contiguous() if numbers.turned else words[begin:end]
    if numbers.added:
        words = words + numbers.added
    return (_across(numbers, words) if numbers.across else _along(numbers, words))[:count, :inputs]


def _along(numbers: Numbers, words: Tensor) -> Tensor:
    """Unpack words [R, C], each of which holds consecutive inputs of one row. Return the fields as uint8 [R, C']."""
    content, bits, mask = words.contiguous().view(torch.uint8), numbers.bits, (1 << numbers.bits) - 1
    if bits == 8:
        return content
    if 8 % bits == 0:
        return (content.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8) & mask).flatten(-2)
    begin = torch.arange(content.shape[-1] * 8 // bits) * bits  # a field may span two bytes
    wide = torch.nn.functional.pad(content, (0, 1)).int()
    pairs = wide[:, begin // 8] | wide[:, begin // 8 + 1] << 8
    return (pairs >> begin % 8 & mask).to(torch.uint8)


def _across(numbers: Numbers, words: Tensor) -> Tensor:
    """Unpack words [R, C], each of which holds consecutive rows at one input. Return the fields as uint8 [R', C]."""
    bits, mask, each = numbers.bits, (1 << numbers.bits) - 1, words.element_size() * 8 // numbers.bits
    if words.element_size() * 8 % bits:  # a field may span two words
        return _along(numbers, words.T).T
    order = INTERLEAVED if numbers.interleaved else range(each)
    fields = torch.empty(len(words), each, words.shape[1], dtype=torch.uint8)
    for row, place in enumerate(order):
        fields[:, row] = words >> place * bits & mask
    return fields.flatten(0, 1)


def scales_of(scales: Scales) -> Tensor:
    """Return the scales, float32 [blocks of rows, blocks of inputs]."""
    found = read(scales.stored)
    rows, inputs = scales.grid
    found = found.view(inputs, rows).T if scales.turned else found.view(rows, inputs)
    scale = torch.exp2(found.float() - 127) if scales.exponent else found.float()
    if scales.overall is not None:
        overall = read(scales.overall).float().view(1, 1)
        scale = scale / overall if scales.divides else scale * overall
    return scale.contiguous()


def flat_rows(encoding: Flat) -> Rows:
    """See `rows_of`."""
    indices, table, inputs = read(encoding.indices).view(-1), read(encoding.table), encoding.shape[1]
    scale = read(encoding.absmax)
    if encoding.codes is not None and encoding.nested is not None:
        nested = read(encoding.nested).repeat_interleave(encoding.nested_size)[: len(scale)]
        scale = read(encoding.codes)[scale.int()] * nested + encoding.offset

    def rows(first: int, count: int) -> Tensor:
        begin, end = first * inputs, (first + count) * inputs
        words = indices[begin // 2 : ceil_div(end, 2)]  # `begin` is even, since `first` is a multiple of ROWS
        values = table[torch.stack((words >> 4, words & 15), -1).view(-1)[: end - begin].int()]
        blocks = torch.arange(begin, end) // encoding.size
        return values.mul_(scale[blocks]).view(count, inputs)

    return rows
