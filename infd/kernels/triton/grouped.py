"""Grouped products on a GPU: each route of a token to an expert is multiplied with the expert's matrix.

A program multiplies a block of routes (`route_blocks.py`) with a tile of their expert's matrix; programs of blocks
without an expert exit at once. In the first product gate and up alternate in a tile's outputs, so that the activation
is computed in the registers that hold the sums. Packed matrices are decoded as in `packed.py`. Never run on a GPU; the
interpreter and the compiler are tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from infd.kernels.router import Gating
from infd.kernels.triton.activation import constants, gated
from infd.kernels.triton.blocks import LEAST
from infd.kernels.triton.expert_tiles import Tile, block_inputs
from infd.kernels.triton.packed import PackedMatrix, add_packed, precision

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import Groups
    from infd.kernels.triton.route_blocks import RouteBlocks

NO_GATING: Final = constants(Gating())
FACTORS: Final = Tile(LEAST, 64, 4, 2)  # of products with adapters' factors


@triton.jit
def _tile(sorted_routes, routes, outputs, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr):
    """Return the program's routes, which of them exist, its rows of the matrix, and which of these exist."""
    tiles = tl.cdiv(outputs, BLOCK_OUTPUTS)
    block = tl.program_id(0) // tiles
    route = tl.load(sorted_routes + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = (tl.program_id(0) % tiles * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)).to(tl.int64)
    output = column
    if GATED:
        output = column // 2 + column % 2 * (outputs // 2)
    return route, route < routes, output, column < outputs


@triton.jit
def _store(
    sums,
    bias,
    out,
    expert,
    route,
    known,
    output,
    inside,
    outputs,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Add the bias [experts, outputs] to sums, activate if GATED, and store the routes' rows of out."""
    if BIAS:
        sums += tl.load(bias + expert * outputs + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        value, up = tl.split(tl.reshape(sums, [BLOCK_ROWS, BLOCK_OUTPUTS // 2, 2]))
        sums = gated(value, up, TANH, ALPHA, LIMITED, LIMIT, OFFSET)
        outputs = outputs // 2
        tiles = tl.cdiv(outputs, BLOCK_OUTPUTS // 2)
        output = (tl.program_id(0) % tiles * (BLOCK_OUTPUTS // 2) + tl.arange(0, BLOCK_OUTPUTS // 2)).to(tl.int64)
        inside = output < outputs
    there = known[:, None] & inside[None, :]
    tl.store(out + route[:, None] * outputs + output[None, :], sums.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["routes"])
def multiply_grouped(
    x,
    sorted_routes,
    experts,
    bias,
    out,
    routes,
    outputs,
    weights,
    weights_expert,
    weights_row,
    x_row,
    size,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Multiply rows of x with matrices [outputs, size], transposed, of which `weights` has one for each expert.

    x                       [routes / CHOSEN, size]
    sorted_routes, experts  `order` and `experts` of RouteBlocks
    out                     [routes, outputs], or if GATED the gated activation, [routes, outputs / 2]
    """
    expert = tl.load(experts + tl.program_id(0) // tl.cdiv(outputs, BLOCK_OUTPUTS)).to(tl.int64)
    if expert < 0:
        return
    route, known, output, inside = _tile(sorted_routes, routes, outputs, GATED, BLOCK_ROWS, BLOCK_OUTPUTS)
    x += route[:, None] // CHOSEN * x_row
    weights += expert * weights_expert + output[None, :] * weights_row
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for first in range(0, size, BLOCK_INPUTS):
        at = first + tl.arange(0, BLOCK_INPUTS)
        value = tl.load(x + at[None, :], mask=known[:, None] & (at < size)[None, :], other=0.0)
        weight = tl.load(weights + at[:, None], mask=inside[None, :] & (at < size)[:, None], other=0.0)
        sums = tl.dot(value, weight, sums, input_precision=PRECISION)
    _store(
        sums, bias, out, expert, route, known, output, inside, outputs,
        BIAS, GATED, TANH, ALPHA, LIMITED, LIMIT, OFFSET, BLOCK_ROWS, BLOCK_OUTPUTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["routes"])
def multiply_grouped_packed(
    x,
    sorted_routes,
    experts,
    bias,
    out,
    routes,
    outputs,
    bytes_expert,
    integers,
    scales,
    minima,
    zeros,
    shared,
    order,
    table,
    x_row,
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
    TILED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMITED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Multiply like `multiply_grouped` with packed matrices, of which each expert's has `bytes_expert` bytes.

    The arguments of `add_packed` describe the first expert's matrix.
    """
    expert = tl.load(experts + tl.program_id(0) // tl.cdiv(outputs, BLOCK_OUTPUTS)).to(tl.int64)
    if expert < 0:
        return
    route, known, output, inside = _tile(sorted_routes, routes, outputs, GATED, BLOCK_ROWS, BLOCK_OUTPUTS)
    place = expert * bytes_expert
    sums = add_packed(
        tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32), x, route // CHOSEN, known, output, inside,
        0, width,
        integers + place,
        scales + place // (scales.dtype.element_ty.primitive_bitwidth // 8),
        minima + place // (minima.dtype.element_ty.primitive_bitwidth // 8),
        zeros + place // (zeros.dtype.element_ty.primitive_bitwidth // 8),
        shared + place // (shared.dtype.element_ty.primitive_bitwidth // 8),
        order + place // (order.dtype.element_ty.primitive_bitwidth // 8),
        table, x_row, size, width, counts, blocks,
        GROUP, FOUR, TABLE, MINIMA, ZEROS, SHARED, ORDER, TILED, PRECISION, BLOCK_INPUTS,
    )  # fmt: skip
    _store(
        sums, bias, out, expert, route, known, output, inside, outputs,
        BIAS, GATED, TANH, ALPHA, LIMITED, LIMIT, OFFSET, BLOCK_ROWS, BLOCK_OUTPUTS,
    )  # fmt: skip


# The factors of adapters have any number of ranks, at any addresses: one kernel for all of them.
multiply_factors = triton.jit(
    multiply_grouped.fn,
    do_not_specialize=[
        "x",
        "bias",
        "out",
        "weights",
        "routes",
        "outputs",
        "weights_expert",
        "weights_row",
        "x_row",
        "size",
    ],
)


class Matrices(NamedTuple):
    """The matrices of all experts for one product.

    form     packed; None: `storage` is [experts, outputs, inputs] in the activations' dtype
    bias     [experts, outputs], or None
    """

    storage: Tensor
    outputs: int
    form: PackedMatrix | None = None
    bias: Tensor | None = None

    @property
    def groups(self) -> Groups | None:
        """Return how the matrices are packed; None: they are not."""
        return None if self.form is None else self.form.groups


def multiply(
    x: Tensor,
    matrices: Matrices,
    blocks: RouteBlocks,
    routes: int,
    tile: Tile,
    *,
    chosen: int = 1,
    gating: Gating | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products of routes with their experts' matrices, [routes, outputs].

    x       [routes / chosen, inputs]
    gating  the outputs are gate and up; returns the gated activation, [routes, outputs / 2]
    dtype   of the result; None: of x
    """
    storage, outputs, form, bias = matrices
    inputs = block_inputs(x.dtype, matrices.groups)
    if form is None:
        kernel, described = multiply_grouped, _dense(storage)
    else:
        kernel, described = multiply_grouped_packed, form.operands(storage[0], inputs)
        described["bytes_expert"] = storage.stride(0)
    x = x if x.stride(1) == 1 else x.contiguous()
    width = outputs if gating is None else outputs // 2
    out = torch.empty((routes, width), dtype=dtype or x.dtype, device=x.device)
    kernel[len(blocks.experts) * triton.cdiv(outputs, tile.outputs),](
        x=x,
        sorted_routes=blocks.order,
        experts=blocks.experts,
        bias=out if bias is None else bias,
        out=out,
        routes=routes,
        outputs=outputs,
        x_row=x.stride(0),
        CHOSEN=chosen,
        BIAS=bias is not None,
        GATED=gating is not None,
        **described,
        **(NO_GATING if gating is None else constants(gating)),
        **_launch(x.dtype, tile, inputs),
    )
    return out


def multiply_by_factors(x: Tensor, factors: Tensor, blocks: RouteBlocks, routes: int, chosen: int = 1) -> Tensor:
    """Return the products of routes with their experts' factors [experts, outputs, inputs], like `multiply`."""
    outputs = factors.shape[1]
    out = torch.empty((routes, outputs), dtype=x.dtype, device=x.device)
    multiply_factors[len(blocks.experts) * triton.cdiv(outputs, FACTORS.outputs),](
        x=x,
        sorted_routes=blocks.order,
        experts=blocks.experts,
        bias=out,
        out=out,
        routes=routes,
        outputs=outputs,
        x_row=x.stride(0),
        CHOSEN=chosen,
        BIAS=False,
        GATED=False,
        **_dense(factors),
        **NO_GATING,
        **_launch(x.dtype, FACTORS, block_inputs(x.dtype, None)),
    )
    return out


def _dense(storage: Tensor) -> dict[str, Any]:
    """Return the arguments of `multiply_grouped` that describe matrices [experts, outputs, inputs]."""
    assert storage.stride(2) == 1
    return {
        "weights": storage,
        "weights_expert": storage.stride(0),
        "weights_row": storage.stride(1),
        "size": storage.shape[2],
    }


def _launch(dtype: torch.dtype, tile: Tile, inputs: int) -> dict[str, Any]:
    return {
        "PRECISION": precision(dtype),
        "BLOCK_ROWS": tile.rows,
        "BLOCK_OUTPUTS": tile.outputs,
        "BLOCK_INPUTS": inputs,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
