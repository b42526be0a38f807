"""Say why FlashInfer's kernels cannot be used, without importing it, which takes seconds."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from infd.kernels.triton import presence as triton

if TYPE_CHECKING:
    from infd.kernels.select import Facts

ASSEMBLED: Final = "flashinfer_jit_cache"  # a wheel of FlashInfer's modules, compiled
TOOLKIT: Final = Path("/usr/local/cuda/bin/nvcc")  # where FlashInfer looks besides


def why_not(facts: Facts, oldest: tuple[int, int] = triton.OLDEST) -> str | None:
    """Return a reason, or None. oldest: the compute capability that a GPU must have"""
    if facts.device.type != "cuda" or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs alone"
    # What it cannot take goes to Triton.
    return cannot_compute(facts.dtype) or cannot_compile() or triton.why_not(facts.device, oldest)


def cannot_compute(dtype: torch.dtype) -> str | None:
    """Return what is wrong with a type of weights, activations and cache, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    return None


def cannot_compile() -> str | None:
    """Return what is missing for its modules to be compiled where they are first called for, or None."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed (the extra `cuda` brings it)"
    if find_spec(ASSEMBLED) is not None:
        return None
    if shutil.which("nvcc") is None and not TOOLKIT.exists():
        return f"flashinfer needs nvcc to compile its kernels, or the package {ASSEMBLED.replace('_', '-')}"
    if shutil.which("ninja") is None:
        return "flashinfer needs ninja to compile its kernels, and finds none in $PATH"
    return None
