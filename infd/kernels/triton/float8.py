"""Matrices of fp8 on a GPU: products of fp8 by torch where it has them, else decoded a tile at a time.

torch._scaled_mm multiplies fp8 inputs by fp8 weights: by cuBLAS on compute capability 9, elsewhere by CUTLASS. Scales
are row-wise, or of 1 x 128 inputs and weights. A matrix with one scale, or several such matrices stacked, have a scale
for each row, exactly. A checkpoint's blocks of 128 x 128 have a scale for each row and 128 inputs, in the order in
which cuBLAS reads scales of 1 x 128; so stacked matrices need not begin where blocks do.

Sums are kept in float32 (`use_fast_accum` would keep fewer bits). Steps of few rows have tiles of their own in Triton:
cuBLAS computes at least 64 rows. Never run on a GPU; tests multiply row-wise by torch on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from infd.groups import Groups
from infd.kernels.reference import float8
from infd.kernels.reference.packed import PackedRows, Section, why_not
from infd.kernels.triton import inputs
from infd.kernels.triton.compiled import aimed_at
from infd.kernels.triton.packed import FEW, NARROW, PackedMatrix, merge, split
from infd.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from infd.input_scheme import InputScheme
    from infd.kernels.families.inputs import Rounding

STEP: Final = 16  # torch multiplies fp8 matrices whose outputs and inputs are multiples of this
BLOCK: Final = 128  # inputs that share a scale, of inputs and of weights
ROWS: Final = 16  # rows of inputs with scales for BLOCK are padded to: cuBLAS reads their scales 16 bytes at a time
NAME: Final = "torch._scaled_mm"  # in the selection table

Capability = tuple[int, int]


def capability() -> Capability | None:
    """Return the compute capability of the GPU that kernels run on, or are compiled for; None: no NVIDIA GPU."""
    target = aimed_at()
    if target is not None and target[1] is None:
        return divmod(int(target[0].removeprefix("sm_")), 10) if target[0].startswith("sm_") else None
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def why_not_scaled(
    outputs: int, inputs_: int, groups: Groups, scheme: InputScheme, dtype: torch.dtype, gpu: Capability | None
) -> str:
    """Return why torch does not multiply inputs quantized by `scheme` by a matrix of `groups`; "" if it does.

    Source: torch 2.11, ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu.
    """
    if reason := inputs.why_not(scheme):
        return reason
    if gpu is None or gpu < (8, 9):
        has = "this GPU has none" if gpu is None else f"this GPU has {gpu[0]}.{gpu[1]}"
        return f"fp8 products need compute capability 8.9; {has}"
    if dtype != torch.bfloat16:
        return f"fp8 products are computed in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if outputs % STEP:
        return f"a matrix of {outputs} outputs, which is no multiple of {STEP}"
    by_row = groups.inputs >= inputs_
    if not scheme.inputs and by_row:
        return ""
    if scheme.inputs != BLOCK or groups.inputs != BLOCK:
        weights = "rows" if by_row else f"groups of {groups.inputs}"
        return f"no product of inputs as {scheme} by weights with scales of {weights}"
    if inputs_ % BLOCK:
        return f"{inputs_} inputs end within a block of {BLOCK}"
    if gpu[0] != 9:
        return f"blocks of {BLOCK} are multiplied on compute capability 9 only; this GPU has {gpu[0]}.{gpu[1]}"
    if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
        return f"blocks of {BLOCK} need CUDA 12.9; torch has {torch.version.cuda}"
    return ""


class Float8Matrix(PackedMatrix):
    """A matrix of fp8 that is decoded for products. Implements families.inputs.QuantizesStored."""

    def __init__(
        self, outputs: int, inputs: int, groups: Groups, activations: torch.dtype, refused: dict[str, str]
    ) -> None:
        super().__init__(outputs, inputs, groups, activations)
        self._refused = refused

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        """Quantize rows with a scale for each, as `infd quantize` does."""
        self.place_groups(storage, first, float8.quantize(rows))

    def stored(self, rounding: Rounding) -> ScaledMatrix | str:
        """See families.inputs.QuantizesStored."""
        reason = why_not_scaled(self.outputs, self.inputs, self.groups, rounding.scheme, self.activations, capability())
        if reason:
            told = self._refused.get(NAME, "")
            if reason not in told:
                self._refused[NAME] = f"{told}; {reason}" if told else reason
            return reason
        return ScaledMatrix(self.outputs, self.inputs, self.groups, self.activations, self._refused, rounding)


class ScaledMatrix(Float8Matrix):
    """A matrix of fp8 whose products quantize their inputs to fp8.

    Scales for groups of inputs are stored by group: those of all rows are contiguous, as cuBLAS reads them.

    few  most rows that Triton multiplies
    """

    few = FEW
    quantizes: InputScheme

    def __init__(
        self,
        outputs: int,
        inputs: int,
        groups: Groups,
        activations: torch.dtype,
        refused: dict[str, str],
        rounding: Rounding,
    ) -> None:
        super().__init__(outputs, inputs, groups, activations, refused)
        self.quantizes, self._scale = rounding.scheme, rounding.scale
        first, shape, dtype = self.sections["scales"]
        self.sections["scales"] = Section(first, shape[::-1], dtype)

    def section(self, name: str, storage: Tensor) -> Tensor | None:
        found = super().section(name, storage)
        return found.t() if found is not None and name == "scales" else found

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        rows, scheme = len(x), self.quantizes
        if not rows:
            return x.new_empty(0, self.outputs)
        weights, scales = self.sections["integers"].of(storage), self.section("scales", storage)
        assert scales is not None
        padded = round_up(rows, ROWS) if scheme.inputs and rows > self.few else rows
        found = inputs.quantize(x, scheme, self._scale, self.padded, padded)
        if rows <= self.few:
            return multiply_few(found, weights, scales, bias, blocks=bool(scheme.inputs))
        # No version of cuBLAS promises to add a bias to products with scales of blocks.
        after = bias if scheme.inputs else None
        product = torch._scaled_mm(
            found.numbers,
            weights.view(torch.float8_e4m3fn).t(),
            scale_a=found.scales,
            scale_b=scales.t(),
            bias=bias if after is None else None,
            out_dtype=x.dtype if after is None else torch.float32,
        )[:rows]
        return product if after is None else product.add_(after).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "steps"])
def multiply_scaled(
    numbers, scales, weights, weight_scales, bias, out, parts,
    rows, outputs, padded, scale_group, weight_group, steps,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Store fp8 numbers [rows, padded] times weights [outputs, padded], transposed and scaled, plus bias.

    The product of all inputs goes to `out`. With several programs along the inputs, each of which takes `steps` blocks,
    sums without bias go to `parts`, [programs, rows, outputs] float32.

    BLOCKS  whether BLOCK_INPUTS inputs share a scale; if not, all inputs do
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(1).to(tl.int64) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(2)
    here = row < rows
    inside = output < outputs
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
    for step in range(part * steps, tl.minimum((part + 1) * steps, tl.cdiv(padded, BLOCK_INPUTS))):
        at = step * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)
        there = at < padded
        value = tl.load(numbers + row[:, None] * padded + at[None, :], mask=here[:, None] & there[None, :], other=0)
        places = output[None, :] * padded + at[:, None]
        weight = tl.load(weights + places, mask=inside[None, :] & there[:, None], other=0)
        # float16 represents each number of E4M3, and its products are summed in float32.
        product = tl.dot(
            value.to(tl.float8e4nv, bitcast=True).to(tl.float16), weight.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        )
        if BLOCKS:
            by = tl.load(scales + step * scale_group + row, mask=here, other=0.0)
            times = tl.load(weight_scales + step * weight_group + output, mask=inside, other=0.0)
            product *= by[:, None] * times[None, :]
        sums += product
    if not BLOCKS:
        by = tl.load(scales + row, mask=here, other=0.0)
        times = tl.load(weight_scales + output, mask=inside, other=0.0)
        sums *= by[:, None] * times[None, :]
    place = row[:, None] * outputs + output[None, :]
    mask = here[:, None] & inside[None, :]
    if tl.num_programs(2) > 1:
        tl.store(parts + part.to(tl.int64) * rows * outputs + place, sums, mask=mask)
    else:
        if BIAS:
            sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)


def multiply_few(
    given: inputs.Quantized, weights: Tensor, scales: Tensor, bias: Tensor | None, *, blocks: bool
) -> Tensor:
    """Return the product of few rows of fp8, [rows, outputs] bfloat16.

    weights  [outputs, padded] bytes of E4M3
    scales   [outputs, groups] float32, each column contiguous
    """
    (rows, padded), outputs, tile = given.numbers.shape, len(weights), NARROW
    assert not blocks or tile.inputs == BLOCK
    out = weights.new_empty((rows, outputs), dtype=torch.bfloat16)
    tiles = ceil_div(rows, tile.rows), ceil_div(outputs, tile.outputs)
    count, steps = split(tiles[0] * tiles[1], ceil_div(padded, tile.inputs), weights.device)
    parts = weights.new_empty((count, rows, outputs), dtype=torch.float32) if count > 1 else out
    multiply_scaled[(*tiles, count)](
        given.numbers.view(torch.uint8), given.scales, weights, scales, given.scales if bias is None else bias, out,
        parts, rows, outputs, padded, given.scales.stride(1), scales.stride(1), steps,
        BLOCKS=blocks, BIAS=bias is not None,
        BLOCK_ROWS=tile.rows, BLOCK_OUTPUTS=tile.outputs, BLOCK_INPUTS=tile.inputs, num_warps=tile.warps, num_stages=4,
    )  # fmt: skip
    if count > 1:
        merge(parts, bias, out)
    return out


class Packed:
    """Implements families.matrices.Packed.

    refused  the reasons why matrices of fp8 are decoded
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> PackedRows | str:
        if reason := why_not(inputs, groups):
            return reason
        if groups.table == "e4m3":
            return Float8Matrix(outputs, inputs, groups, dtype, self.refused)
        return PackedMatrix(outputs, inputs, groups, dtype)


class QuantizedFloat8:
    """Forms of weights that are quantized to fp8 while loading, with a scale for each row; inputs have one by token."""

    numbers = (8, "e4m3")
    rounds = float8.BY_TOKEN

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Float8Matrix:
        return Float8Matrix(outputs, inputs, Groups(8, inputs, "F32", table="e4m3"), dtype, self.refused)
