"""Read encoded matrices without decoding them, for forms of parameters that store integers and scales unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.rounding import ceil_div
from infd.weights.encodings.rows import DTYPES, read, unpack
from infd.weights.encodings.scaled import Scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.weights.stored import Encoding


NARROWER = {torch.float32: (torch.bfloat16, torch.float16)}  # by dtype, the narrower dtypes that it represents exactly


def why_not(encoding: Encoding, bits: int, inputs: int, scales: torch.dtype) -> str:
    """Return the reason that a parameter's form cannot store an encoded matrix unchanged; "" if the form can.

    bits    bits of an integer in the form
    inputs  number of inputs that share a scale in the form
    scales  dtype of the form's scales
    """
    if not isinstance(encoding, Scaled) or encoding.numbers.type not in ("uint", "int"):
        return "its numbers are no integers"
    if encoding.numbers.bits != bits:
        return f"{encoding.numbers.bits} bits, the form has {bits}"
    if encoding.zeros is not None:
        return "the form has no zero points"
    if encoding.groups is not None:
        return "the form does not reorder inputs"
    if encoding.columns is not None or encoding.scales.overall is not None or encoding.scales.factor != 1:
        return "its weights have a second scale"
    _, width = encoding.scales.block
    if width % inputs and width < encoding.shape[-1]:
        whole = inputs >= encoding.shape[-1]
        return "the form has one scale for each row" if whole else f"the form has groups of {inputs} inputs"
    if encoding.scales.exponent or DTYPES[encoding.scales.stored.dtype] not in (scales, *NARROWER.get(scales, ())):
        return f"its scales are {encoding.scales.stored.dtype}"
    return ""


def integers_of(encoding: Encoding, inputs: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Read the stored tensors of a matrix; return a function that returns some of the matrix's rows, not decoded.

    The function's arguments are the first row and the number of rows n. It returns integers [n, in] int8, and scales
    [n, groups of `inputs` inputs] in the stored dtype. The form must be one for which `why_not` returned "".
    Raises CheckpointError.
    """
    assert isinstance(encoding, Scaled)
    numbers, scales, width = encoding.numbers, encoding.scales, encoding.shape[-1]
    height, _ = scales.block
    words, stored = read(numbers.stored), read(scales.stored)
    scale = stored.view(scales.grid[::-1]).T if scales.turned else stored.view(scales.grid)
    each, groups = max(1, scales.block[1] // inputs), ceil_div(width, inputs)

    def rows(first: int, count: int) -> tuple[Tensor, Tensor]:
        integers = unpack(numbers, words, first, count, width).to(torch.int8)
        some = scale[torch.arange(first, first + count) // height]
        if some.shape[1] == 1:
            return integers, some.expand(-1, groups)
        return integers, some.repeat_interleave(each, 1)[:, :groups]

    return rows
