"""Decide what an error of a step means: a step too large for the device's memory, a device that is lost, or itself."""

from __future__ import annotations

import traceback
from typing import Final

import torch

from infd.errors import DeviceLost, OutOfMemory, StepTooLarge

# What runs out of memory beside torch's allocator on a GPU says so in words: the one on a CPU, CUDA, Triton, cuBLAS.
WORDS: Final = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


def diagnose(error: Exception, device: torch.device) -> Exception:
    """Return the error, StepTooLarge, or DeviceLost if it has left the device unusable."""
    if lacks_memory(error):
        let_go(error)
        return StepTooLarge(str(error))
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as lost:
            lost.__cause__ = error
            return DeviceLost(f"{device} cannot be used any more: {lost}")
    return error


def lacks_memory(error: BaseException) -> bool:
    """Say whether there would have been no error with more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def let_go(error: BaseException) -> None:
    """Free what the work behind an error holds, and what torch keeps for later work.

    A traceback holds on to every tensor of the frames that it shows. What torch keeps, others cannot have: libraries'
    workspaces, and kernels that need memory of their own, are not served by its allocator.
    """
    behind: BaseException | None = error
    while behind is not None:
        traceback.clear_frames(behind.__traceback__)
        behind = behind.__context__
    torch.cuda.empty_cache()
