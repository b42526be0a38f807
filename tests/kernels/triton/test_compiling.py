"""Every kernel compiles for GPUs that need not be installed, within their resources."""

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
}  # bytes of shared memory available to a block
# Spills in a loop cost memory accesses. AMD's GPUs may spill a little: one loop spills 19 registers. On sm_80 the
# float32 norm keeps two numbers on the stack.
SPILLED = {"sm_80": 8, "sm_89": 0, "sm_90a": 0, "gfx942": 32}
NARROW = SHARED.keys() - {"sm_80"}  # GPUs with fp8 conversions
FAMILIES = ("attention", "span attention", "narrow cache", "dense", "draw", "lora", "packed", "scaled", "experts")
ROOT = Path(__file__).parents[3]


def compiled(family: str) -> list[dict]:
    """Return the resources of each kernel of a family."""
    # The cache is in the tree's build folder, so that only changed kernels are compiled again.
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


@pytest.mark.timeout(1500)  # compiles for four GPUs with nothing cached: minutes of processor time
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_for_gpus_and_fit(family):
    kernels = compiled(family)
    assert {kernel["target"] for kernel in kernels} == set(NARROW if family in ("narrow cache", "scaled") else SHARED)
    too_large = [
        kernel
        for kernel in kernels
        if kernel["shared"] > SHARED[kernel["target"]] or kernel["spilled"] > SPILLED[kernel["target"]]
    ]
    assert not too_large


@pytest.mark.usefixtures("triton")
def test_blocks_of_large_heads_are_reduced_to_a_gpus_shared_memory():
    kernels = compiled("large heads")
    assert {kernel["target"] for kernel in kernels} == set(SHARED)
    assert not [kernel for kernel in kernels if kernel["shared"] > SHARED[kernel["target"]]]


@pytest.mark.usefixtures("triton")
def test_an_adapters_matrices_are_read_several_numbers_at_once():
    """For `expand` only the head's kernel shows it: the others also load unaligned results of the product."""
    kernels = [kernel for kernel in compiled("lora") if kernel["target"] == "sm_90a"]
    assert not [kernel for kernel in kernels if kernel["kernel"] == "shrink" and kernel["single"]]
    assert any(
        kernel["kernel"] == "expand" and not kernel["single"] for kernel in kernels if "bfloat16" in kernel["case"]
    )
