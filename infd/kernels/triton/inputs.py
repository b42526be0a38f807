"""Inputs of products, quantized to fp8 E4M3 on a GPU in one launch.

Scales and numbers are those of `kernels/reference/inputs.py`, to the bit: divisions round to nearest. Never run on a
GPU; the interpreter and the compiler are tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl

from infd.kernels.reference import inputs
from infd.kernels.reference.float8 import LARGEST
from infd.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from infd.input_scheme import InputScheme

BLOCK: Final = 4096  # most inputs that a program reads at once
INPUTS: Final = 2048  # inputs of a program if groups of them share a scale
MOST = tl.constexpr(LARGEST)


class Quantized(NamedTuple):
    """Inputs as fp8.

    numbers  [rows, padded] float8_e4m3fn; inputs behind the last are 0
    scales   [rows, groups] float32, each column contiguous
    """

    numbers: Tensor
    scales: Tensor


@triton.jit
def _scale(most, POWERS: tl.constexpr):
    """Return the scales of numbers whose largest magnitudes are `most`."""
    scale = tl.div_rn(most, MOST)
    if POWERS:
        above = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), above, scale)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _nearest(value, scale):
    """Return the numbers of E4M3 nearest to value / scale."""
    scaled = tl.div_rn(value, scale)
    scaled = tl.minimum(tl.maximum(scaled, -MOST, propagate_nan=tl.PropagateNan.ALL), MOST, tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv)


@triton.jit
def _write(numbers, number, scale, mask, DECODE: tl.constexpr):
    """Store numbers, or the inputs that they represent."""
    if DECODE:
        tl.store(numbers, (number.to(tl.float32) * scale).to(numbers.dtype.element_ty), mask=mask)
    else:
        tl.store(numbers, number, mask=mask)


@triton.jit
def quantize_rows(
    x, scale, numbers, scales, x_row, size, padded,
    STATIC: tl.constexpr, POWERS: tl.constexpr, DECODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize one row of x [rows, size], all of whose inputs share a scale, into numbers [rows, padded]."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    lane = tl.arange(0, BLOCK)
    if STATIC:
        by = tl.load(scale)
    else:
        most = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            value = tl.load(x + first + lane, mask=first + lane < size, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(value))
        by = _scale(tl.max(most, 0), POWERS)
    if not DECODE:
        tl.store(scales + row, by)
    for first in range(0, padded, BLOCK):
        at = first + lane
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        _write(numbers + row * padded + at, _nearest(value, by), by, at < padded, DECODE)


@triton.jit
def quantize_groups(
    x, numbers, scales, x_row, size, padded, scale_group,
    GROUP: tl.constexpr, POWERS: tl.constexpr, DECODE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantize some groups of GROUP inputs of one row; each group has a scale."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * x_row + at, mask=at < size, other=0.0).to(tl.float32)
    by = _scale(tl.max(tl.abs(value), 1), POWERS)
    if not DECODE:
        tl.store(scales + group * scale_group + row, by, mask=group * GROUP < size)
    _write(numbers + row * padded + at, _nearest(value, by[:, None]), by[:, None], at < padded, DECODE)


def why_not(scheme: InputScheme) -> str:
    """Return why these kernels do not quantize by `scheme`; "" if they do."""
    if scheme.numbers != "e4m3" or scheme.zeros:
        return f"inputs are not rounded to {scheme}"
    if scheme.inputs & (scheme.inputs - 1) or scheme.inputs > INPUTS:
        return f"groups of {scheme.inputs} inputs are no power of two"
    return ""


def quantize(x: Tensor, scheme: InputScheme, scale: Tensor | None, padded: int, rows: int) -> Quantized:
    """Quantize x [T, in] by a scheme for which `why_not` is "".

    scale   the stored scale of a static scheme, [1] float32 on the device
    padded  inputs of a row of the result
    rows    of the result, at least T; rows behind T are not written
    """
    numbers = x.new_empty((rows, padded), dtype=torch.float8_e4m3fn)
    groups = ceil_div(x.shape[1], scheme.inputs) if scheme.inputs else 1
    scales = x.new_empty((groups, rows) if scheme.inputs else (rows, 1), dtype=torch.float32)
    _launch(x, scheme, scale, numbers, scales, decode=False)
    return Quantized(numbers, scales.t() if scheme.inputs else scales)


def _launch(
    x: Tensor, scheme: InputScheme, scale: Tensor | None, numbers: Tensor, scales: Tensor, *, decode: bool
) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    (rows, size), padded, group = x.shape, numbers.shape[1], scheme.inputs
    if group:
        each = max(1, INPUTS // group)
        quantize_groups[rows, ceil_div(round_up(padded, group) // group, each)](
            x, numbers, scales, x.stride(0), size, padded, scales.stride(0),
            GROUP=group, POWERS=scheme.powers, DECODE=decode, GROUPS=each,
        )  # fmt: skip
    else:
        quantize_rows[(rows,)](
            x, scales if scale is None else scale, numbers, scales, x.stride(0), size, padded,
            STATIC=scale is not None, POWERS=scheme.powers, DECODE=decode,
            BLOCK=min(BLOCK, triton.next_power_of_2(padded)), num_warps=8,
        )  # fmt: skip


class Inputs(inputs.Inputs):
    """Implements families.inputs.Inputs. Integers and fp4 are left to the reference."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def round(self, x: Tensor, scheme: InputScheme, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        if reason := why_not(scheme):
            self.refused["triton"] = f"delegates to the reference: {reason}"
            return super().round(x, scheme, scale, zero)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if len(x):
            _launch(x, scheme, scale, out, out, decode=True)
        return out
