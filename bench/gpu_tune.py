"""Run `infd warm --tune` on a GPU, and time attention with the default tiling and with the one it keeps.

The checkpoint is small, with a large model's heads: a tiling depends on the heads only. Kernels and tilings are kept in
a temporary directory, so other programs compute with the default tiling. The kept tiling is read as `infd start` reads
it.

    python bench/gpu_tune.py --models qwen3-0.6b
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_kernels import attention
from gpu_kit import ROOT, checkpoint
from gpu_machine import MODELS, Bench, Figures, Shape

from infd.runner.start.setup import choose_device

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG = 8  # contexts of a long sequence, in the usual context


def warm(model: Path, kept: Path) -> float:
    """Run `infd warm --tune` for a checkpoint; return the seconds. Raises CalledProcessError."""
    command = [sys.executable, "-m", "infd", "warm", "--tune", "--model", str(model), "--dtype", "bfloat16"]
    began = time.perf_counter()
    subprocess.run([*command, "--set", f"device.kernel_cache={kept}"], cwd=ROOT, check=True)
    return time.perf_counter() - began


def mixes(batches: Sequence[int], context: int) -> list[list[tuple[int, int]]]:
    """Return the spans of steps: decoding sequences, a long one, a prompt."""
    return [*([(context - 1, 1)] * batch for batch in batches), [(LONG * context - 1, 1)], [(0, context)]]


def timed(bench: Bench, config: dict[str, Any], spans: list[tuple[int, int]], name: str) -> float:
    """Report attention with the tilings kept in the directory of compiled kernels; return the seconds."""
    from infd.kernels.triton.attention import PagedAttention

    return attention(bench, name, PagedAttention(), Shape.of(config), spans).best


def measure(bench: Bench, config: dict[str, Any], steps: Sequence[list[tuple[int, int]]], scratch: Path) -> None:
    """Report tuning of a model's heads. scratch: an empty directory."""
    from infd.kernels.triton import blocks, compiled, tilings

    gpu, kept = blocks.gpu(bench.device), scratch / "kernels"
    checkpoint(scratch / "model", config["num_attention_heads"])
    compiled.keep(kept, lambda entry: None)
    usual = [timed(bench, config, spans, "default") for spans in steps]
    seconds = warm(scratch / "model", kept)
    found = tilings.read(tilings.ATTENTION, kept, gpu)
    if not found:
        raise RuntimeError(f"no tiling is kept in {kept} for {gpu.name}")
    bench.figures.note("warm", s=seconds, tilings=len(found))
    for name, tiling in found.items():
        print(f"{name}: {tiling}")
    for spans, before in zip(steps, usual, strict=True):
        after = timed(bench, config, spans, "tuned")
        counts = f"{len(spans)} spans of {sum(count for _, count in spans)}"
        bench.figures.note(f"tuned attention beside the default, {counts}", times=after / before)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="where figures are written, a line each")
    return parser.parse_args(argv)


def main() -> None:
    asked = parse()
    with asked.json.open("w") as file:
        bench = Bench(choose_device(asked.device), asked.rounds, Figures(file))
        for name in asked.models:
            bench.figures.model = name
            with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
                measure(bench, MODELS[name], mixes(asked.batches, asked.context), Path(scratch))


if __name__ == "__main__":
    main()
