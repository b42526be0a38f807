"""Compare products with quantized matrices with the reference on a GPU, and time them beside bfloat16.

For gate and up, and for down, of a model: integers and fp8 that Triton decodes, and fp8 whose inputs are quantized by a
scheme. A row's `times` is its time in floors; the floor reads the matrix once, or multiplies at bfloat16's rate.
`off` is the distance from the reference, in shares of its norm. Further figures answer three questions:

beside bfloat16      time divided by that of torch's product with the same matrix in bfloat16
of few rows, beside  time of Triton's kernel for few rows divided by torch._scaled_mm's: what FEW should be
fast accumulation    time of torch._scaled_mm with use_fast_accum divided by that without, and what it adds to `off`

    python bench/gpu_products.py --models qwen3-8b
    python bench/gpu_products.py --device cpu --models tiny     # in the interpreter; its figures mean nothing
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_machine import MODELS, Bench, Figures, Shape
from torch.nn.functional import linear

from infd.groups import BLOCK, GroupedRows, Groups
from infd.input_scheme import InputScheme
from infd.kernels.families.inputs import Rounding
from infd.kernels.families.matrices import SCALE_TYPES
from infd.kernels.reference.inputs import Inputs
from infd.kernels.reference.packed import PackedRows
from infd.rounding import ceil_div
from infd.runner.start.setup import choose_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.kernels.triton.float8 import ScaledMatrix

WHOLE = 1 << 24  # inputs of a group: all of a row
KINDS: dict[str, tuple[Groups, InputScheme | None]] = {
    "int4 in groups of 128": (Groups(4, 128, "BF16"), None),
    "Q4_K": (Groups(4, 32, "I8", minima=True), None),
    "NVFP4": (Groups(4, 16, "F32", table="e2m1"), None),
    "int8 in rows": (Groups(8, WHOLE, "F32"), None),
    "fp8, decoded": (Groups(8, WHOLE, "F32", table="e4m3"), None),
    "fp8 by token": (Groups(8, WHOLE, "F32", table="e4m3"), InputScheme("e4m3")),
    "fp8, stored scale": (Groups(8, WHOLE, "F32", table="e4m3"), InputScheme("e4m3", static=True)),
    "fp8 in blocks": (Groups(8, 128, "F32", table="e4m3"), InputScheme("e4m3", 128)),
}
EDGE = (16, 32, 64)  # rows at which Triton's kernel for few rows is compared with torch's product


def drawn(kind: Groups, outputs: int, inputs: int) -> GroupedRows:
    """Return random rows of a kind."""
    size = min(kind.inputs, inputs)
    counts, half = (outputs, ceil_div(inputs, size)), 1 << kind.bits - 1
    low = 0 if kind.minima and kind.bits == 4 else -half
    integers = torch.randint(low, low + 2 * half, (outputs, inputs), dtype=torch.int8)
    if kind.table == "e4m3":
        integers.masked_fill_((integers & 127) == 127, 0)  # NaN

    def scales() -> torch.Tensor:
        if kind.scales == "I8":
            return torch.randint(1, 64, counts, dtype=torch.int8)
        return torch.rand(counts).to(SCALE_TYPES[kind.scales])

    shared = torch.rand(outputs, ceil_div(inputs, BLOCK) * (1 + kind.minima)).half() if kind.scales == "I8" else None
    return GroupedRows(integers, scales(), minima=scales() if kind.minima else None, shared=shared)


def products(bench: Bench, outputs: int, inputs: int, batches: Sequence[int]) -> None:
    """Report the products of one matrix."""
    from infd.kernels.triton import float8

    device, packed = bench.device, float8.Packed()
    plain = torch.randn(outputs, inputs, device=device).bfloat16()
    x = {rows: torch.randn(rows, inputs, device=device).bfloat16() for rows in sorted({*batches, *EDGE})}
    usual = {rows: bench.timed(partial(linear, given, plain)).best for rows, given in x.items()}
    scale = torch.full((1,), 0.01, device=device)
    for name, (kind, scheme) in KINDS.items():
        form = packed.form(outputs, inputs, torch.bfloat16, kind)
        assert not isinstance(form, str), form
        rounding = None
        if scheme is not None:
            rounding = Rounding(Inputs(), scheme, scale if scheme.static else None, None)
            assert isinstance(form, float8.Float8Matrix)
            form = form.stored(rounding)
            if isinstance(form, str):
                print(f"{name}, {outputs} x {inputs}: {form}")
                continue
        storage = torch.zeros(form.shape, dtype=form.dtype, device=device)
        form.place_groups(storage, 0, drawn(kind, outputs, inputs))
        for rows in batches:
            given = x[rows]
            rounded = given if rounding is None else Inputs().round(given, *rounding[1:])
            expected = PackedRows.multiply(form, rounded, storage)
            work = partial(form.multiply, given, storage)
            taken = bench.timed(work)
            floor = bench.machine.floor(storage.nbytes, 2 * rows * outputs * inputs)
            title = f"{name}, {rows} rows, {outputs} x {inputs}"
            bench.figures.kernel(title, taken, floor, off=off(work(), expected))
            bench.figures.note(f"{title}, beside bfloat16", times=taken.best / usual[rows])
        if isinstance(form, float8.ScaledMatrix) and not form.quantizes.static:
            for rows in EDGE:
                title = f"{name} of few rows, beside torch, {rows} rows, {outputs} x {inputs}"
                edge(bench, form, x[rows], storage, title)
    fast(bench, x[max(batches)], plain)


def edge(bench: Bench, form: ScaledMatrix, x: torch.Tensor, storage: torch.Tensor, name: str) -> None:
    """Report the time of Triton's kernel for few rows, divided by that of torch's product."""
    before, found = form.few, []
    for few in (len(x), 0):
        form.few = few
        found.append(bench.timed(partial(form.multiply, x, storage)).best)
    form.few = before
    bench.figures.note(name, times=found[0] / found[1])


def fast(bench: Bench, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Report torch's product with fewer bits of sums."""
    a, b = (each.to(torch.float8_e4m3fn) for each in (x, weights))
    one, other = (torch.ones(size, device=x.device) for size in ((len(a), 1), (1, len(b))))
    exact = a.float() @ b.float().t()
    found = []
    for less in (True, False):
        work = partial(torch._scaled_mm, a, b.t(), one, other, out_dtype=torch.bfloat16, use_fast_accum=less)
        found.append((bench.timed(work).best, off(work(), exact)))
    (quick, rough), (slow, near) = found
    name = f"fast accumulation, {len(x)} rows, {weights.shape[0]} x {weights.shape[1]}"
    bench.figures.note(name, times=quick / slow, off=rough, off_without=near)


def off(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance from `expected`, divided by its norm."""
    return float((given.float() - expected.float()).norm() / expected.float().norm())


def matrices(config: dict[str, object]) -> Iterator[tuple[int, int]]:
    shape = Shape.of(config)
    yield 2 * shape.inner, shape.hidden
    yield shape.hidden, shape.inner


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["qwen3-8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 512, 4096], help="rows of inputs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="where figures are written, a line each")
    return parser.parse_args(argv)


def main() -> None:
    asked = parse()
    with asked.json.open("w") as file, torch.inference_mode():
        bench = Bench(choose_device(asked.device), asked.rounds, Figures(file))
        bench.figures.note("machine", GB_s=bench.machine.bytes_s / 1e9, TFLOP_s=bench.machine.flops / 1e12)
        for name in asked.models:
            bench.figures.model = name
            for outputs, inputs in matrices(MODELS[name]):
                products(bench, outputs, inputs, asked.batches)


if __name__ == "__main__":
    main()
