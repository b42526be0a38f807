"""Say why Triton's kernels cannot run on a device, without importing triton, which takes a while."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

OLDEST: Final = (8, 0)  # compute capability: bfloat16 in matrix products, and copies behind the arithmetic
FLOAT8: Final = (8, 9)  # from which on 8-bit floats are converted
COMPILERS: Final = ("cc", "gcc", "clang")


ABSENT: Final = "triton is not installed (the extra `cuda` brings it)"


def installed() -> bool:
    return find_spec("triton") is not None


def why_not(device: torch.device, oldest: tuple[int, int] = OLDEST) -> str | None:
    """Return a reason, or None. oldest: the compute capability that NVIDIA's GPUs must have"""
    if device.type != "cuda":
        return f"runs on a GPU, not on {device.type}"
    if not installed():
        return ABSENT
    if torch.version.hip is None and (has := torch.cuda.get_device_capability(device)) < oldest:
        return f"wants compute capability {oldest[0]}.{oldest[1]}; this GPU has {has[0]}.{has[1]}"
    return without_compiler()


def without_compiler() -> str | None:
    """Return what of a C compiler is missing, or None. What launches a kernel is compiled where it is launched."""
    if not any(map(shutil.which, COMPILERS)):
        return f"triton needs a C compiler, and finds none of {', '.join(COMPILERS)}"
    if not Path(_include(), "Python.h").exists():
        return "triton needs Python.h, which comes with Python's development package"
    return None


def _include() -> str:
    """Return where triton looks for Python's headers. Source: triton/runtime/build.py."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a directory beneath /usr/local, where its packages put no headers.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
