"""Classify the errors of steps: the step was too large for the device's memory, the device is lost, or neither."""

from __future__ import annotations

import traceback
from typing import Final

import torch

from infd.errors import DeviceLost, OutOfMemory, StepTooLarge

# Parts of error messages of allocators that raise other errors than torch.OutOfMemoryError: torch's on a CPU, CUDA's,
# Triton's, cuBLAS's.
WORDS: Final = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


def diagnose(error: Exception, device: torch.device) -> Exception:
    """Return StepTooLarge if memory ran out, DeviceLost if the device became unusable, else the error."""
    if lacks_memory(error):
        free_tensors(error)
        return StepTooLarge(str(error))
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as lost:
            lost.__cause__ = error
            return DeviceLost(f"{device} is unusable after an error: {lost}")
    return error


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def free_tensors(error: BaseException) -> None:
    """Free the tensors of an error's frames, and torch's cache of free memory.

    A traceback refers to every tensor of its frames. Libraries' workspaces, and kernels that allocate memory
    themselves, cannot use memory in the cache of torch's allocator.
    """
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__context__
    torch.cuda.empty_cache()
