"""Say why FlashInfer's kernels cannot be used, without importing it, which takes seconds."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from infd.kernels.triton import presence as triton

if TYPE_CHECKING:
    from infd.kernels.select import Facts

ASSEMBLED = "flashinfer_jit_cache"  # a wheel of FlashInfer's kernels, compiled


def why_not(facts: Facts) -> str | None:
    """Return a reason, or None."""
    if facts.device.type != "cuda" or torch.version.hip is not None:
        return "runs on NVIDIA's GPUs alone"
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, not in {str(facts.dtype).removeprefix('torch.')}"
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed (the extra `cuda` brings it)"
    if find_spec(ASSEMBLED) is None and shutil.which("nvcc") is None:
        return f"flashinfer needs nvcc to compile its kernels, or the package {ASSEMBLED.replace('_', '-')}"
    return triton.why_not(facts.device)  # what it cannot take goes there
