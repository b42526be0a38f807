"""Read encoded matrices without decoding them, for forms of parameters that store integers and scales unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.groups import BLOCK, GroupedRows, common
from infd.rounding import ceil_div
from infd.weights.encodings.blocks import TABLES, block_groups
from infd.weights.encodings.gguf import Blocks
from infd.weights.encodings.rows import fields_of, read, scales_of, unpack, unpack_zeros
from infd.weights.encodings.scaled import Scaled, shift

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.groups import Groups
    from infd.weights.stored import EncodedTensor, Encoding, StoredTensor


NARROWER = {"F32": ("BF16", "F16")}  # by dtype, the narrower dtypes that it represents exactly


def why_not(stored: StoredTensor | EncodedTensor, form: Groups) -> str:
    """Return the reason that a form of integers and scales cannot represent a matrix exactly; "" if the form can."""
    packed = stored.packed()
    if packed is None:
        return "it is not quantized"
    if isinstance(packed, str):
        return packed
    wide = common((packed, form))
    if wide is None or wide._replace(inputs=form.inputs) != form:
        reason = _differs(packed, form)
        if reason:
            return reason
    width = stored.shape[-1]
    if packed.inputs % form.inputs and packed.inputs < width:
        whole = form.inputs >= width
        return "the form has one scale for each row" if whole else f"the form has groups of {form.inputs} inputs"
    return ""


def _differs(packed: Groups, form: Groups) -> str:
    if packed.table != form.table:
        return "its numbers are no integers" if packed.table else f"the form has the table {form.table}"
    if packed.bits != form.bits:
        return f"{packed.bits} bits, the form has {form.bits}"
    if packed.zeros and not form.zeros:
        return "the form has no zero points"
    if packed.minima != form.minima:
        return "the form has minima" if form.minima else "the form has no minima"
    if packed.order != form.order:
        return "the form reorders inputs otherwise" if form.order else "the form does not reorder inputs"
    if packed.scales not in (form.scales, *NARROWER.get(form.scales, ())):
        return f"its scales are {packed.scales}"
    return ""


def widened(rows: GroupedRows, packed: Groups, form: Groups) -> GroupedRows:
    """Return rows of the kind `packed`, with groups of the form's size, as rows of the form's kind."""
    integers, scales, minima, shared = rows.integers, rows.scales, rows.minima, rows.shared
    if packed.table and not form.table:
        integers = torch.tensor(TABLES[packed.table], dtype=torch.int8)[integers.int() + 8]
    if shared is not None and form.scales != "I8":
        factors = shared.float().view(len(shared), -1, 1 + packed.minima).repeat_interleave(BLOCK // form.inputs, 1)
        scales, shared = scales * factors[:, : scales.shape[1], 0], None
        minima = None if minima is None else minima * factors[:, : scales.shape[1], 1]
    elif shared is not None and form.minima and not packed.minima:
        shared = torch.stack((shared, torch.zeros_like(shared)), 2).flatten(1)
    return rows._replace(integers=integers, scales=scales, minima=minima, shared=shared)


def integers_of(encoding: Encoding, inputs: int) -> Callable[[int, int], GroupedRows]:
    """Read the stored tensors of a matrix; return a function that returns some of the matrix's rows, not decoded.

    The function's arguments are the first row and the number of rows. Each group of `inputs` inputs has a scale, and
    a zero point or a minimum if the matrix has these. `why_not` must have returned "" for the form.

    Raises CheckpointError.
    """
    match encoding:
        case Scaled():
            return scaled_groups(encoding, inputs)
        case Blocks():
            return block_groups(encoding, inputs)
        case _:
            raise TypeError(encoding)


def scaled_groups(encoding: Scaled, inputs: int) -> Callable[[int, int], GroupedRows]:
    """See `integers_of`."""
    numbers, scales, width = encoding.numbers, encoding.scales, encoding.shape[-1]
    height, size = scales.block
    words, table = read(numbers.stored), numbers.type in ("e2m1", "e4m3")
    scale = scales_of(scales) / 2 if numbers.type == "e2m1" else scales_of(scales)
    zero = None if encoding.zeros is None else unpack_zeros(encoding.zeros, scales) - shift(numbers)
    order = None if encoding.groups is None else read(encoding.groups).long().argsort(stable=True)
    each, groups = max(1, size // inputs), ceil_div(width, inputs)

    def spread(blocks: Tensor, first: int, count: int) -> Tensor:
        some = blocks[torch.arange(first, first + count) // height]
        return some.expand(-1, groups) if some.shape[1] == 1 else some.repeat_interleave(each, 1)[:, :groups]

    def rows(first: int, count: int) -> GroupedRows:
        if table:
            fields = fields_of(numbers, words, first, count, width)
            integers = (fields.to(torch.int16) - (1 << numbers.bits - 1)).to(torch.int8)
        else:
            integers = (unpack(numbers, words, first, count, width) - shift(numbers)).to(torch.int8)
        zeros = None if zero is None else spread(zero, first, count).to(torch.int8)
        return GroupedRows(integers if order is None else integers[:, order], spread(scale, first, count), zeros, order)

    return rows
