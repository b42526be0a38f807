"""Compare a layer of experts with the reference on a GPU, and time both: tokens choose experts at random.

A row's `times` is its time in floors; the floor reads each chosen expert once, or multiplies at bfloat16's rate. `off`
is the distance from the reference, in shares of its norm. The reference waits for the device, so it is timed launched.

    python bench/gpu_experts.py --mixtures qwen3-30b-a3b
    python bench/gpu_experts.py --device cpu --mixtures tiny     # in the interpreter; its figures mean nothing
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_machine import Bench, Figures
from msgspec.structs import replace

from infd.groups import Groups
from infd.kernels.families.experts import Routes
from infd.kernels.recipe import StackRecipe
from infd.kernels.reference import experts as reference
from infd.kernels.reference.packed import PackedRows
from infd.runner.start.setup import choose_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.kernels.recipe import ExpertsRecipe

# Experts, experts of a token, hidden size, inner size
MIXTURES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "tiny": (8, 2, 64, 32),
}
FORMS: dict[str, Groups | None] = {
    "bfloat16": None,
    "int4 in groups of 32": Groups(4, 32, "BF16"),
    "MXFP4": Groups(4, 32, "BF16", table="e2m1"),
    "fp8 in blocks": Groups(8, 128, "F32", table="e4m3"),
}


def measure(bench: Bench, sizes: tuple[int, int, int, int], batches: Sequence[int]) -> None:
    """Report one mixture in each form."""
    from infd.kernels.triton.expert_tiles import ExpertsShape
    from infd.kernels.triton.experts import Experts
    from infd.kernels.triton.tuning_experts import random_layer

    experts, chosen, hidden, inner = sizes
    for name, groups in FORMS.items():
        layer = random_layer(ExpertsShape(*sizes, torch.bfloat16, groups, groups), bench.device)
        plain, family = in_reference(layer), Experts()
        bytes_each = (layer.gate_up.storage.nbytes + layer.down.storage.nbytes) / experts
        for tokens in batches:
            x = torch.randn(tokens, hidden, device=bench.device).bfloat16()
            order = torch.rand(tokens, experts, device=bench.device).topk(chosen).indices
            routes = Routes(order, torch.rand(tokens, chosen, device=bench.device))
            work, slow = (
                partial(family.compute, x, routes, layer),
                partial(reference.Experts().compute, x, routes, plain),
            )
            expected = slow().float()
            off = float((work().float() - expected).norm() / expected.norm())
            used = int(order.flatten().bincount(minlength=experts).count_nonzero())
            floor = bench.machine.floor(bytes_each * used, 6 * tokens * chosen * hidden * inner)
            taken = bench.timed(work)
            bench.figures.kernel(f"triton experts, {name}, {tokens} tokens", taken, floor, off=off)
            beside = bench.seconds(slow, times=3)
            bench.figures.note(
                f"triton experts beside the reference, {name}, {tokens} tokens", times=taken.best / beside
            )


def in_reference(layer: ExpertsRecipe) -> ExpertsRecipe:
    """Return the layer with forms whose products plain torch computes."""

    def plain(stack: StackRecipe) -> StackRecipe:
        form = stack.form
        if isinstance(form, PackedRows):
            form = PackedRows(form.outputs, form.inputs, form.groups, form.activations)
        return StackRecipe(form, stack.storage, stack.bias)

    return replace(layer, gate_up=plain(layer.gate_up), down=plain(layer.down))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--mixtures", choices=MIXTURES, nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="where figures are written, a line each")
    return parser.parse_args(argv)


def main() -> None:
    asked = parse()
    with asked.json.open("w") as file, torch.inference_mode():
        bench = Bench(choose_device(asked.device), asked.rounds, Figures(file))
        for name in asked.mixtures:
            bench.figures.model = name
            measure(bench, MIXTURES[name], asked.batches)


if __name__ == "__main__":
    main()
