"""Compare matrix products with cold weights: infd's packed forms, torch's, and memory bandwidth.

Every form holds the same matrices of several decoder layers, larger in total than any cache. A round runs every form
once over all matrices, so that disturbances affect all forms; ratios are within a round.

    python bench/kernels.py --threads 2 --rows 1 8 32 128 512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from infd.groups import BLOCK, GroupedRows, Groups
from infd.kernels.cpu.groups import Int4
from infd.kernels.cpu.library import Library
from infd.kernels.cpu.linear import PANEL, Compressed, Int8, Matrices, Panels
from infd.kernels.cpu.packed import Packed
from infd.kernels.families.matrices import SCALE_TYPES, Grouped
from infd.runner.arenas.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.kernels.families.matrices import Form

# Outputs and inputs of a decoder layer's matrices.
SHAPES = {
    "0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],  # Qwen3-0.6B
    "110m": [(2304, 768), (768, 768), (4096, 768), (768, 2048)],  # Llama-like
    "head": [(151936, 1024)],
}
# Integers as checkpoints store them.
PACKED = {
    "f16-32": Groups(4, 32, "F16"),
    "f16-128": Groups(4, 128, "F16"),
    "gptq-128": Groups(4, 128, "F16", zeros=True),
    "act-order": Groups(4, 128, "F16", zeros=True, order="random"),
    "mxfp4": Groups(4, 32, "BF16", table="e2m1"),
    "nvfp4": Groups(4, 16, "F32", table="e2m1"),
    "fp8": Groups(8, 128, "F32", table="e4m3"),
    "q4_0": Groups(4, 32, "F16"),
    "q4_1": Groups(4, 32, "F16", minima=True),
    "q8_0": Groups(8, 32, "F16"),
    "q4_k": Groups(4, 32, "I8", minima=True),
    "q6_k": Groups(6, 16, "I8"),
}


Product = Callable[[Tensor, int], Tensor]
FAMILIES = {"infd": Matrices, "small": Matrices, "compressed": Compressed, "int8": Int8, "int4": Int4}


def forms(shapes: list[tuple[int, int]], count: int, isa: str | None, only: Sequence[str]) -> dict[str, Product]:
    """Return by name a function that multiplies rows with the i-th matrix, whose shape is i modulo the shapes.

    "small" is infd's form with weights in 4 KiB pages; "int8" and "int4" are infd's quantized forms, and PACKED those
    that keep a checkpoint's integers; the others are TORCH's. `only` names those that are made; empty: all.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(*shapes[i % len(shapes)], generator=generator) / 32).bfloat16() for i in range(count * len(shapes))
    ]
    size = sum(2 * (outputs + PANEL) * (inputs + 8) for outputs, inputs in shapes) * count
    products: dict[str, Product] = {}
    for name in only or (*FAMILIES, *PACKED, *TORCH):
        if name in TORCH:
            products[name] = TORCH[name](weights)
            continue
        arena = Arena(size, torch.device("cpu"), "weights")
        held = [_placed(name, weight, arena, isa, generator) for weight in weights]
        while name != "small" and arena.collapse():
            pass
        products[name] = partial(_multiply, held)
    return products


def _placed(
    name: str, weight: Tensor, arena: Arena, isa: str | None, generator: torch.Generator
) -> tuple[Form, Tensor]:
    """Return a form of the matrix, and the matrix in it: for PACKED, random integers of its shape."""
    if name in FAMILIES:
        form: Form = FAMILIES[name](Library(isa)).form(*weight.shape, weight.dtype)
        kept = arena.take(form.shape, form.dtype)
        form.place(kept, 0, weight)
        return form, kept
    packed = Packed(Library(isa)).form(*weight.shape, weight.dtype, PACKED[name])
    assert isinstance(packed, Panels)
    assert isinstance(packed, Grouped)
    kept = arena.take(packed.shape, packed.dtype)
    packed.place_groups(kept, 0, _drawn(*weight.shape, packed.groups, generator))
    return packed, kept


def _prepacked(weights: list[Tensor]) -> Product:
    kept = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    return lambda x, i: torch.ops.mkldnn._linear_pointwise(x, kept[i], None, "none", [], "")


def _int_mm(weights: list[Tensor]) -> Product:
    """Return torch's integer product without scales."""
    whole = [(weight * 127).to(torch.int8) for weight in weights]
    return lambda x, i: torch._int_mm(x.to(torch.int8), whole[i].T)


def _int4pack(weights: list[Tensor]) -> Product:
    """Return torch's int4 product, also in groups of 32."""
    fours, scales = [], []
    for weight in weights:
        numbers = torch.randint(16, weight.shape, dtype=torch.int32)
        fours.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1))
        scales.append(torch.full((weight.shape[1] // 32, weight.shape[0], 2), 1 / 256).bfloat16())
    return lambda x, i: torch.ops.aten._weight_int4pack_mm_for_cpu(x, fours[i], 32, scales[i])


# torch's products; oneDNN's needs a CPU with AVX-512.
TORCH: dict[str, Callable[[list[Tensor]], Product]] = {
    "oneDNN": _prepacked,
    "F.linear": lambda weights: lambda x, i: functional.linear(x, weights[i]),
    "_int_mm": _int_mm,
    "_int4pack": _int4pack,
}


def _drawn(outputs: int, inputs: int, groups: Groups, generator: torch.Generator) -> GroupedRows:
    """Return random integers in groups."""
    count, blocks = -(-inputs // groups.inputs), -(-inputs // BLOCK) * (1 + groups.minima)

    def numbers() -> Tensor:
        if groups.scales == "I8":
            return torch.randint(64, (outputs, count), generator=generator).to(torch.int8)
        return torch.rand(outputs, count, generator=generator).to(SCALE_TYPES[groups.scales]) / 256

    half = 1 << groups.bits - 1
    least = 0 if groups.minima and groups.bits == 4 else -half
    shared = torch.rand(outputs, blocks, generator=generator).half() / 4096 if groups.scales == "I8" else None
    return GroupedRows(
        torch.randint(least, least + 2 * half, (outputs, inputs), generator=generator).to(torch.int8),
        numbers(),
        torch.randint(-8, 8, (outputs, count), generator=generator).to(torch.int8) if groups.zeros else None,
        torch.randperm(inputs, generator=generator) if groups.order else None,
        numbers() if groups.minima else None,
        shared,
    )


def _multiply(held: list[tuple[Form, Tensor]], x: Tensor, i: int) -> Tensor:
    form, kept = held[i]
    return form.multiply(x, kept)


def size_of(form: str) -> float:
    """Return bytes per weight."""
    if (groups := PACKED.get(form)) is not None:
        sets = groups.zeros + (1 + groups.minima) * SCALE_TYPES[groups.scales].itemsize  # bytes of a group
        shared = 16 * (1 + groups.minima) / BLOCK if groups.scales == "I8" else 0
        return (groups.bits + 8 * sets / groups.inputs + shared) / 8
    return 4.5 / 8 if "int4" in form else 1 if "int" in form else 2


def bandwidth(clock: Callable[[], float], size: int = 2**28) -> float:
    """Return GB/s of one read through memory larger than the caches."""
    memory = torch.ones(size // 4)
    started = clock()
    memory.max()
    return size / (clock() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--shapes", choices=SHAPES, default="0.6b")
    parser.add_argument("--mib", type=int, default=256, help="of weights in each form")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", help="another instruction set than the best")
    parser.add_argument("--only", nargs="+", help="these forms")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: bears with a busy machine better")
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)

    shapes = SHAPES[arguments.shapes]
    numbers = sum(outputs * inputs for outputs, inputs in shapes)
    count = -(-arguments.mib * 2**20 // (2 * numbers))
    products = forms(shapes, count, arguments.isa, arguments.only or ())
    reading = [bandwidth(clock) for _ in range(5)]
    print(f"{arguments.threads} threads, {count * 2 * numbers / 1e6:.0f} MB of weights; ", end="")
    print(f"memory reads at {statistics.median(reading):.1f} GB/s ({min(reading):.1f} to {max(reading):.1f})")
    print("rows  form        GB/s  GFLOP/s   infd is faster by (median, least, most)")
    with torch.inference_mode():
        for rows in arguments.rows:
            inputs = {width: torch.randn(rows, width).bfloat16() for _, width in shapes}
            taken: dict[str, list[float]] = {name: [] for name in products}
            for _ in range(arguments.rounds + 1):
                for name, product in products.items():
                    started = clock()
                    for i in range(count * len(shapes)):
                        product(inputs[shapes[i % len(shapes)][1]], i)
                    taken[name].append(clock() - started)
            for name, times in taken.items():
                median = statistics.median(times[1:])
                line = f"{rows:4}  {name:9} {count * size_of(name) * numbers / median / 1e9:6.1f}"
                line += f"  {2 * rows * count * numbers / median / 1e9:7.0f}"
                if "infd" in taken and name != "infd":
                    ratios = sorted(theirs / ours for ours, theirs in zip(taken["infd"][1:], times[1:], strict=True))
                    line += f"   {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(line, flush=True)


if __name__ == "__main__":
    main()
