"""Products with matrices of integers in groups on a GPU: a tile of the matrix is decoded, then multiplied.

The forms and their layout are `kernels/reference/packed.py`'s. A decoded weight is rounded to the activations' dtype,
as if loading had decoded the matrix; activations are not quantized. Never run on a GPU; the interpreter and the
compiler are tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl

from infd.kernels.reference.packed import STEP, TABLES, PackedRows, why_not

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import Groups

FEW: Final = 16  # rows of x that one tile of the smaller kind holds


class Tile(NamedTuple):
    """Rows of x, outputs and inputs of a tile."""

    rows: int
    outputs: int
    inputs: int
    warps: int


NARROW: Final = Tile(FEW, 32, 128, 4)
BROAD: Final = Tile(64, 64, 64, 4)


@triton.jit
def _spread(numbers, output, group, counts, here):
    """Load the number of each group of each output, as float32."""
    return tl.load(numbers + output * counts + group, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _e4m3(byte):
    """Decode bytes of fp8 E4M3, by integers: not all GPUs convert it."""
    size = byte & 127
    normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # 2^-9
    value = tl.where(size == 127, float("nan"), value)
    return tl.where(byte > 127, -value, value)


@triton.jit
def _e2m1(field):
    """Decode indices of fp4 E2M1 to its numbers doubled."""
    size = field & 7
    large = (2 + (size & 1)) << (tl.maximum(size >> 1, 1) - 1)
    value = tl.where(size < 4, size, large).to(tl.float32)
    return tl.where(field > 7, -value, value)


@triton.jit
def _weights(
    number,
    output,
    at,
    here,
    scales,
    minima,
    zeros,
    shared,
    counts,
    blocks,
    GROUP: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Scale numbers [inputs, outputs] float32 of inputs `at`, of which those `here` exist."""
    group = at // GROUP
    if ZEROS:
        number -= _spread(zeros, output, group, counts, here)
    scale = _spread(scales, output, group, counts, here)
    if SHARED:
        scale *= _spread(shared, output, at // 256 * (1 + MINIMA), blocks, here)
    number *= scale
    if MINIMA:
        least = _spread(minima, output, group, counts, here)
        if SHARED:
            least *= _spread(shared, output, at // 256 * 2 + 1, blocks, here)
        number += least
    return number


@triton.jit
def _inputs(x, row, at, order, x_row, rows, size, ORDER: tl.constexpr):
    """Load x [rows, inputs] at inputs `at`, of which those below `size` exist."""
    column = at
    if ORDER:
        column = tl.load(order + at, mask=at < size, other=0)
    there = (row < rows)[:, None] & (at < size)[None, :]
    return tl.load(x + row[:, None] * x_row + column[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def multiply_packed(
    x,
    integers,
    scales,
    minima,
    zeros,
    shared,
    order,
    table,
    bias,
    out,
    rows,
    x_row,
    outputs,
    size,
    width,
    counts,
    blocks,
    GROUP: tl.constexpr,
    FOUR: tl.constexpr,
    TABLE: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    SHARED: tl.constexpr,
    ORDER: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Store x [rows, size] times the matrix [outputs, size], transposed, plus bias, in out [rows, outputs].

    integers  [outputs, width] bytes
    counts    groups of an output; `blocks`: shared scales of an output
    TABLE     name of the table; "" for integers
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1).to(tl.int64) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inside = output < outputs
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    BYTES: tl.constexpr = BLOCK_INPUTS // 2 if FOUR else BLOCK_INPUTS
    byte = tl.arange(0, BYTES)
    for first in range(0, width, BYTES):
        place = first + byte
        there = (place < width)[:, None] & inside[None, :]
        stored = tl.load(integers + output[None, :] * width + place[:, None], mask=there, other=0).to(tl.int32)
        if FOUR:
            at = place // 16 * 32 + place % 16
            for half in tl.static_range(2):
                field = (stored >> 4 * half) & 15
                here = at + 16 * half
                if TABLE == "e2m1":
                    number = _e2m1(field)
                elif TABLE == "iq4_nl":
                    number = tl.load(table + field).to(tl.float32)
                elif MINIMA:
                    number = field.to(tl.float32)
                else:
                    number = (field - 8).to(tl.float32)
                weight = _weights(
                    number, output[None, :], here[:, None], there & (here < size)[:, None],
                    scales, minima, zeros, shared, counts, blocks, GROUP, MINIMA, ZEROS, SHARED,
                )  # fmt: skip
                value = _inputs(x, row, here, order, x_row, rows, size, ORDER)
                sums = tl.dot(value, weight.to(value.dtype), sums, input_precision=PRECISION)
        else:
            number = _e4m3(stored) if TABLE == "e4m3" else tl.where(stored > 127, stored - 256, stored).to(tl.float32)
            weight = _weights(
                number, output[None, :], place[:, None], there & (place < size)[:, None],
                scales, minima, zeros, shared, counts, blocks, GROUP, MINIMA, ZEROS, SHARED,
            )  # fmt: skip
            value = _inputs(x, row, place, order, x_row, rows, size, ORDER)
            sums = tl.dot(value, weight.to(value.dtype), sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & inside[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], sums.to(out.dtype.element_ty), mask=there)


class PackedMatrix(PackedRows):
    """A matrix of integers in groups on a GPU."""

    def __init__(self, outputs: int, inputs: int, groups: Groups, activations: torch.dtype) -> None:
        super().__init__(outputs, inputs, groups, activations)
        self._tables: dict[torch.device, Tensor] = {}  # of iq4_nl; its address must not change

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self.outputs), dtype=x.dtype, device=x.device)
        tile, groups = NARROW if x.shape[0] <= FEW else BROAD, self.groups
        integers, scales = self.sections["integers"].of(storage), self.sections["scales"].of(storage)
        minima, zeros, shared, order = (self.section(name, storage) for name in ("minima", "zeros", "shared", "order"))
        grid = triton.cdiv(x.shape[0], tile.rows), triton.cdiv(self.outputs, tile.outputs)
        multiply_packed[grid](
            x,
            integers,
            scales,
            scales if minima is None else minima,
            scales if zeros is None else zeros,
            scales if shared is None else shared,
            scales if order is None else order,
            self._table(x.device) if groups.table == "iq4_nl" else scales,
            scales if bias is None else bias,
            out,
            x.shape[0],
            x.stride(0),
            self.outputs,
            self.inputs,
            integers.shape[1],
            scales.shape[1],
            1 if shared is None else shared.shape[1],
            GROUP=groups.inputs,
            FOUR=groups.bits == 4,
            TABLE=groups.table,
            MINIMA=minima is not None,
            ZEROS=zeros is not None,
            SHARED=shared is not None,
            ORDER=order is not None,
            BIAS=bias is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            BLOCK_ROWS=tile.rows,
            BLOCK_OUTPUTS=tile.outputs,
            BLOCK_INPUTS=tile.inputs,
            num_warps=tile.warps,
        )
        return out

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = torch.tensor(TABLES["iq4_nl"], dtype=torch.int8, device=device)
        return self._tables[device]


class Packed:
    """Implements families.matrices.Packed."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> PackedMatrix | str:
        return why_not(inputs, groups) or PackedMatrix(outputs, inputs, groups, dtype)


assert NARROW.inputs % STEP == BROAD.inputs % STEP == 0
