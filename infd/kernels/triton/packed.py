"""Products with matrices of integers in groups on a GPU: a tile of the matrix is decoded, then multiplied.

The forms and their layout are `kernels/reference/packed.py`'s. Activations are not quantized. Integers and numbers of
tables are exact in the activations' dtype; where a tile's inputs share a scale, it multiplies the tile's float32 sums.
Weights of smaller groups are scaled and rounded to the activations' dtype first, as if loading had decoded them; 16 of
them share a load of their scale. Steps of many rows decode the matrix in slabs, for torch's product: tiles would decode
each weight once for each tile of rows. Never run on a GPU; the interpreter and the compiler are tested.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from infd.kernels.reference.packed import STEP, TABLES, PackedRows
from infd.kernels.triton import blocks
from infd.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import Groups

FEW: Final = 16  # rows of x that one tile of the smaller kind holds
MANY: Final = 128  # most rows for which tiles are decoded; for more, slabs of the matrix are
SLAB: Final = 64 << 20  # bytes of decoded rows at a time
PROGRAMS: Final = 4  # of a multiprocessor, which hide the latency of memory
STEPS: Final = 4  # fewest tiles along the inputs that a program multiplies, if several share a row's inputs
MERGED: Final = 1024  # numbers that a program adds up


class Tile(NamedTuple):
    """Rows of x, outputs and inputs of a tile."""

    rows: int
    outputs: int
    inputs: int
    warps: int


NARROW: Final = Tile(FEW, 32, 128, 4)
BROAD: Final = Tile(64, 64, 64, 4)
FLOAT32: Final = Tile(FEW, 32, 32, 4)  # a thread's share of a larger tile does not fit its registers


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
def _repeated(numbers, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Repeat numbers [runs, outputs] for each of the 16 inputs of a run."""
    return tl.reshape(tl.broadcast_to(numbers[:, None, :], (INPUTS // 16, 16, OUTPUTS)), (INPUTS, OUTPUTS))


@triton.jit
def _weights(
    number,
    output,
    run,
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
    """Scale numbers [inputs, outputs] float32, which are runs of 16 inputs: no group divides a run.

    run   [inputs / 16, 1] first input of each run
    here  [inputs / 16, outputs] which runs exist
    """
    INPUTS: tl.constexpr = number.shape[0]
    OUTPUTS: tl.constexpr = number.shape[1]
    group = run // GROUP
    if ZEROS:
        number -= _repeated(_spread(zeros, output, group, counts, here), INPUTS, OUTPUTS)
    scale = _spread(scales, output, group, counts, here)
    if SHARED:
        scale *= _spread(shared, output, run // 256 * (1 + MINIMA), blocks, here)
    number *= _repeated(scale, INPUTS, OUTPUTS)
    if MINIMA:
        least = _spread(minima, output, group, counts, here)
        if SHARED:
            least *= _spread(shared, output, run // 256 * 2 + 1, blocks, here)
        number += _repeated(least, INPUTS, OUTPUTS)
    return number


@triton.jit
def _inputs(x, row, known, at, order, x_row, size, ORDER: tl.constexpr):
    """Load x [rows, inputs] at inputs `at`, of which those below `size` exist, of those rows that are `known`."""
    column = at
    if ORDER:
        column = tl.load(order + at, mask=at < size, other=0)
    there = known[:, None] & (at < size)[None, :]
    return tl.load(x + row[:, None] * x_row + column[None, :], mask=there, other=0.0)


@triton.jit
def _number4(field, table, TABLE: tl.constexpr, MINIMA: tl.constexpr):
    """Return the numbers of fields of four bits, float32."""
    if TABLE == "e2m1":
        number = _e2m1(field)
    elif TABLE == "iq4_nl":
        number = tl.load(table + field).to(tl.float32)
    elif MINIMA:
        number = field.to(tl.float32)
    else:
        number = (field - 8).to(tl.float32)
    return number


@triton.jit
def _number8(byte, TABLE: tl.constexpr):
    """Return the numbers of bytes, float32."""
    return _e4m3(byte) if TABLE == "e4m3" else tl.where(byte > 127, byte - 256, byte).to(tl.float32)


@triton.jit
def _add_product(
    sums, value, number, output, run, here, step_group, scales, minima, zeros, shared, counts, blocks,
    GROUP: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr, SHARED: tl.constexpr,
    TILED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return sums plus value [rows, inputs] times numbers [inputs, outputs], which are scaled unless TILED.

    run, here   see `_weights`; if TILED, `here` [1, outputs] is which outputs exist
    step_group  the group of all inputs, if TILED
    """
    if TILED:
        if ZEROS:
            number -= tl.load(zeros + output * counts + step_group, mask=here, other=0).to(tl.float32)
        weight = number
    else:
        weight = _weights(
            number, output, run, here, scales, minima, zeros, shared, counts, blocks, GROUP, MINIMA, ZEROS, SHARED
        )
    return tl.dot(value, weight.to(value.dtype), sums, input_precision=PRECISION)


@triton.jit
def add_packed(
    sums, x, row, known, output, inside, begin, end,
    integers, scales, minima, zeros, shared, order, table, x_row, size, width, counts, blocks,
    GROUP: tl.constexpr, FOUR: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr,
    SHARED: tl.constexpr, ORDER: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Return sums [rows, outputs] plus rows of x times a packed matrix, transposed, in tiles from `begin` to `end`.

    row, known      rows of x, and which of them exist
    output, inside  rows of the matrix, int64, and which of them exist
    integers        [outputs, width] bytes
    size            inputs
    counts          groups of an output; `blocks`: shared scales of an output
    TABLE           name of the table; "" for integers
    TILED           whether the BLOCK_INPUTS inputs of a tile share a scale
    """
    BYTES: tl.constexpr = BLOCK_INPUTS // 2 if FOUR else BLOCK_INPUTS
    byte = tl.arange(0, BYTES)
    runs = tl.arange(0, BYTES // 16)[:, None] * 16
    for step in range(begin, tl.minimum(end, tl.cdiv(width, BYTES))):
        place = step * BYTES + byte
        there = (place < width)[:, None] & inside[None, :]
        group = step * BLOCK_INPUTS // GROUP
        stored = tl.load(integers + output[None, :] * width + place[:, None], mask=there, other=0).to(tl.int32)
        product = tl.zeros_like(sums) if TILED else sums
        if FOUR:
            at = place // 16 * 32 + place % 16
            for half in tl.static_range(2):
                value = _inputs(x, row, known, at + 16 * half, order, x_row, size, ORDER)
                number = _number4((stored >> 4 * half) & 15, table, TABLE, MINIMA)
                run = 2 * (step * BYTES + runs) + 16 * half
                product = _add_product(
                    product, value, number, output[None, :], run,
                    inside[None, :] if TILED else (run < size) & inside[None, :],
                    group, scales, minima, zeros, shared, counts, blocks,
                    GROUP, MINIMA, ZEROS, SHARED, TILED, PRECISION,
                )  # fmt: skip
        else:
            value = _inputs(x, row, known, place, order, x_row, size, ORDER)
            run = step * BYTES + runs
            product = _add_product(
                product, value, _number8(stored, TABLE), output[None, :], run,
                inside[None, :] if TILED else (run < size) & inside[None, :],
                group, scales, minima, zeros, shared, counts, blocks, GROUP, MINIMA, ZEROS, SHARED, TILED, PRECISION,
            )  # fmt: skip
        if TILED:
            scale = tl.load(scales + output * counts + group, mask=inside, other=0.0).to(tl.float32)
            sums += product * scale[None, :]
        else:
            sums = product
    return sums


@triton.jit(do_not_specialize=["rows", "steps"])
def multiply_packed(
    x, bias, out, parts, rows, outputs, steps,
    integers, scales, minima, zeros, shared, order, table, x_row, size, width, counts, blocks,
    GROUP: tl.constexpr, FOUR: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr,
    SHARED: tl.constexpr, ORDER: tl.constexpr, TILED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Store x [rows, size] times the matrix [outputs, size], transposed, plus bias, in out [rows, outputs].

    With several programs along the inputs, each of which takes `steps` tiles, sums without bias go to `parts` instead,
    [programs, rows, outputs] float32. Other arguments: see `add_packed`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1).to(tl.int64) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(2)
    inside = output < outputs
    sums = add_packed(
        tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32), x, row, row < rows, output, inside,
        part * steps, (part + 1) * steps,
        integers, scales, minima, zeros, shared, order, table, x_row, size, width, counts, blocks,
        GROUP, FOUR, TABLE, MINIMA, ZEROS, SHARED, ORDER, TILED, PRECISION, BLOCK_INPUTS,
    )  # fmt: skip
    target = row[:, None] * outputs + output[None, :]
    there = (row < rows)[:, None] & inside[None, :]
    if tl.num_programs(2) > 1:
        tl.store(parts + part.to(tl.int64) * rows * outputs + target, sums, mask=there)
    else:
        if BIAS:
            sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + target, sums.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["size", "count"])
def merge_parts(parts, bias, out, size, outputs, count, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sums of parts [count, size], in their order, plus bias [outputs], in out [size]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    sums = tl.zeros([BLOCK], tl.float32)
    parts += at
    for _ in range(count):
        sums += tl.load(parts, mask=inside, other=0.0)
        parts += size
    if BIAS:
        sums += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def decode_packed(
    integers, scales, minima, zeros, shared, table, out, outputs, size, width, counts, blocks,
    GROUP: tl.constexpr, FOUR: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Store the weights of a tile in out [outputs, size], with inputs in the stored order; see `multiply_packed`."""
    output = (tl.program_id(0).to(tl.int64) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS))[None, :]
    place = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    there = (place < width)[:, None] & (output < outputs)
    stored = tl.load(integers + output * width + place[:, None], mask=there, other=0).to(tl.int32)
    runs = (tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES // 16) * 16)[:, None]
    for half in tl.static_range(2 if FOUR else 1):
        if FOUR:
            at = (place // 16 * 32 + place % 16 + 16 * half)[:, None]
            number = _number4((stored >> 4 * half) & 15, table, TABLE, MINIMA)
            run = 2 * runs + 16 * half
        else:
            at = place[:, None]
            number = _number8(stored, TABLE)
            run = runs
        weight = _weights(
            number, output, run, (run < size) & (output < outputs), scales, minima, zeros, shared, counts, blocks,
            GROUP, MINIMA, ZEROS, SHARED,
        )  # fmt: skip
        tl.store(out + output * size + at, weight.to(out.dtype.element_ty), mask=there & (at < size))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; of a large GPU if `device` is none."""
    return blocks.gpu(device).multiprocessors


def split(tiles: int, steps: int, device: torch.device) -> tuple[int, int]:
    """Return how many programs share the inputs of each tile of a product, and how many of `steps` each takes.

    A matrix of few outputs has too few tiles to keep the memory of a GPU busy.
    """
    count = max(1, min(PROGRAMS * multiprocessors(device) // tiles, steps // STEPS))
    each = ceil_div(steps, count)
    return ceil_div(steps, each), each


def merge(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add up parts [count, rows, outputs] float32 and bias, into out [rows, outputs], in the order of the parts."""
    merge_parts[(ceil_div(out.numel(), MERGED),)](
        parts, parts if bias is None else bias, out, out.numel(), out.shape[1], len(parts),
        BIAS=bias is not None, BLOCK=MERGED,
    )  # fmt: skip


class PackedMatrix(PackedRows):
    """A matrix of integers in groups on a GPU."""

    def __init__(self, outputs: int, inputs: int, groups: Groups, activations: torch.dtype) -> None:
        super().__init__(outputs, inputs, groups, activations)
        self._tables: dict[torch.device, Tensor] = {}  # of iq4_nl; its address must not change

    def operands(self, storage: Tensor, inputs: int) -> dict[str, Any]:
        """Return the arguments of `add_packed` that describe the matrix, for tiles of `inputs` inputs."""
        groups = self.groups
        integers, scales = self.sections["integers"].of(storage), self.sections["scales"].of(storage)
        minima, zeros, shared, order = (self.section(name, storage) for name in ("minima", "zeros", "shared", "order"))
        whole = groups.inputs >= self.inputs
        return {
            "integers": integers,
            "scales": scales,
            "minima": scales if minima is None else minima,
            "zeros": scales if zeros is None else zeros,
            "shared": scales if shared is None else shared,
            "order": scales if order is None else order,
            "table": self._table(storage.device) if groups.table == "iq4_nl" else scales,
            "size": self.inputs,
            "width": integers.shape[1],
            "counts": scales.shape[1],
            "blocks": 1 if shared is None else shared.shape[1],
            "GROUP": round_up(groups.inputs, inputs) if whole else groups.inputs,
            "FOUR": groups.bits == 4,
            "TABLE": groups.table,
            "MINIMA": minima is not None,
            "ZEROS": zeros is not None,
            "SHARED": shared is not None,
            "ORDER": order is not None,
            "TILED": minima is None and shared is None and (whole or groups.inputs % inputs == 0),
        }

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        if x.shape[0] > (FEW if x.dtype == torch.float32 else MANY):
            return self._multiply_decoded(x, storage, bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self.outputs), dtype=x.dtype, device=x.device)
        tile = NARROW if x.shape[0] <= FEW else BROAD
        if x.dtype == torch.float32:
            tile = FLOAT32
        tiles = ceil_div(x.shape[0], tile.rows), ceil_div(self.outputs, tile.outputs)
        count, steps = split(tiles[0] * tiles[1], ceil_div(self.padded, tile.inputs), x.device)
        parts = torch.empty((count, *out.shape), dtype=torch.float32, device=x.device) if count > 1 else out
        described = self.operands(storage, tile.inputs)
        by_weight = tile is BROAD and not described["TILED"]  # scales take registers
        multiply_packed[(*tiles, count)](
            x,
            out if bias is None else bias,
            out,
            parts,
            x.shape[0],
            self.outputs,
            steps,
            x_row=x.stride(0),
            **described,
            BIAS=bias is not None,
            PRECISION=precision(x.dtype),
            BLOCK_ROWS=tile.rows,
            BLOCK_OUTPUTS=tile.outputs,
            BLOCK_INPUTS=tile.inputs,
            num_warps=2 * tile.warps if by_weight else tile.warps,
        )
        if count > 1:
            merge(parts, bias, out)
        return out

    def _multiply_decoded(self, x: Tensor, storage: Tensor, bias: Tensor | None) -> Tensor:
        if (order := self.section("order", storage)) is not None:
            x = x.index_select(1, order)
        slab = max(SLAB // (self.inputs * x.element_size()) // BROAD.outputs, 1) * BROAD.outputs
        weights = torch.empty((min(slab, self.outputs), self.inputs), dtype=x.dtype, device=x.device)
        if slab >= self.outputs:
            self._decode(storage, 0, weights)
            return F.linear(x, weights, bias)
        out = torch.empty((x.shape[0], self.outputs), dtype=x.dtype, device=x.device)
        for first in range(0, self.outputs, slab):
            some = slice(first, min(first + slab, self.outputs))
            part = weights[: some.stop - first]
            self._decode(storage, first, part)
            if bias is None:
                torch.mm(x, part.t(), out=out[:, some])
            else:
                torch.addmm(bias[some], x, part.t(), out=out[:, some])
        return out

    def _decode(self, storage: Tensor, first: int, out: Tensor) -> None:
        """Decode rows from `first` on into out [n, inputs], with inputs in the stored order."""
        groups, some = self.groups, slice(first, first + len(out))
        integers, scales = self.sections["integers"].of(storage)[some], self.sections["scales"].of(storage)[some]
        minima, zeros, shared = (self.section(name, storage) for name in ("minima", "zeros", "shared"))
        grid = ceil_div(len(out), NARROW.outputs), ceil_div(integers.shape[1], NARROW.inputs)
        decode_packed[grid](
            integers,
            scales,
            scales if minima is None else minima[some],
            scales if zeros is None else zeros[some],
            scales if shared is None else shared[some],
            self._table(out.device) if groups.table == "iq4_nl" else scales,
            out,
            len(out),
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
            BLOCK_OUTPUTS=NARROW.outputs,
            BLOCK_BYTES=NARROW.inputs,
        )

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = torch.tensor(TABLES["iq4_nl"], dtype=torch.int8, device=device)
        return self._tables[device]


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products of float32, which half-precision floats ignore."""
    return "ieee" if dtype is torch.float32 else "tf32"


assert NARROW.inputs % STEP == BROAD.inputs % STEP == FLOAT32.inputs % STEP == 0
