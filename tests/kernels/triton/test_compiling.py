"""Every kernel compiles for GPUs that are not here, and fits into what they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "gfx942": 64 * 1024,
}  # bytes that a block may have
# A loop that spills waits for memory. AMD's GPUs are only held to working: one of their loops spills 19 registers.
# On the oldest of NVIDIA's the norm of float32 keeps two numbers on the stack.
SPILLED = {"sm_80": 8, "sm_89": 0, "sm_90a": 0, "gfx942": 32}
NARROW = SHARED.keys() - {"sm_80"}  # GPUs that have 8-bit floats
ROOT = Path(__file__).parents[3]


def compiled(family: str) -> list[dict]:
    """Return what is said of each kernel of a family."""
    # Compiled code is kept in the tree's build folder: only what has changed is compiled again.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiling", family],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("family", ["attention", "narrow cache", "dense", "draw", "lora"])
def test_kernels_compile_for_gpus_and_fit(family):
    kernels = compiled(family)
    assert {kernel["target"] for kernel in kernels} == set(NARROW if family == "narrow cache" else SHARED)
    too_large = [
        kernel
        for kernel in kernels
        if kernel["shared"] > SHARED[kernel["target"]] or kernel["spilled"] > SPILLED[kernel["target"]]
    ]
    assert not too_large


@pytest.mark.usefixtures("triton")
def test_blocks_of_large_heads_are_cut_down_to_what_a_gpu_has():
    kernels = compiled("large heads")
    assert {kernel["target"] for kernel in kernels} == set(SHARED)
    assert not [kernel for kernel in kernels if kernel["shared"] > SHARED[kernel["target"]]]


@pytest.mark.usefixtures("triton")
def test_an_adapters_matrices_are_read_several_numbers_at_once():
    """Of `expand` the one for the head shows it: elsewhere a product's results, where they begin anywhere, are read."""
    kernels = [kernel for kernel in compiled("lora") if kernel["target"] == "sm_90a"]
    assert not [kernel for kernel in kernels if kernel["kernel"] == "shrink" and kernel["single"]]
    assert any(
        kernel["kernel"] == "expand" and not kernel["single"] for kernel in kernels if "bfloat16" in kernel["case"]
    )
