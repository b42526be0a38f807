"""Report why Triton's kernels are unavailable. Does not import triton: the import takes a second."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

OLDEST: Final = (8, 0)  # lowest compute capability with bfloat16 matrix products and asynchronous copies
FLOAT8: Final = (8, 9)  # lowest compute capability with fp8 conversions
COMPILERS: Final = ("cc", "gcc", "clang")


ABSENT: Final = "triton is not installed (the extra `cuda` brings it)"


def installed() -> bool:
    """Return whether triton is installed."""
    return find_spec("triton") is not None


def why_not(device: torch.device, oldest: tuple[int, int] = OLDEST) -> str | None:
    """Return why Triton's kernels are unavailable, or None. oldest: lowest compute capability, on NVIDIA GPUs."""
    if device.type != "cuda":
        return f"runs on a GPU, not on {device.type}"
    if not installed():
        return ABSENT
    if torch.version.hip is None and (has := torch.cuda.get_device_capability(device)) < oldest:
        return f"needs compute capability {oldest[0]}.{oldest[1]}; this GPU has {has[0]}.{has[1]}"
    return without_compiler()


def without_compiler() -> str | None:
    """Return why Triton cannot compile kernel launchers here (no C compiler, or no Python.h), or None."""
    if not any(map(shutil.which, COMPILERS)):
        return f"triton needs a C compiler; there is none of {', '.join(COMPILERS)}"
    if not Path(_include(), "Python.h").exists():
        return "triton needs Python.h, which comes with Python's development package"
    return None


def _include() -> str:
    """Return the directory where Triton looks for Python's headers. Source: triton/runtime/build.py."""
    scheme = sysconfig.get_default_scheme()
    # Debian's default scheme names a directory below /usr/local, but Debian's packages install headers elsewhere.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
