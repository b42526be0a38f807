"""Call CUDA's driver by name, through cuda-bindings, and say which call failed.

The package comes with torch's CUDA builds and is imported only where there is a GPU.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from infd.errors import DeviceLost, OutOfMemory

REFUSALS: Final = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_OPERATING_SYSTEM")
ABSENT: Final = "cuda-bindings cannot be imported ({}); torch's CUDA builds bring it"


class Refused(DeviceLost):
    """The driver does not do this on this host. Where infd can do without, nothing is lost."""


class Driver:
    """The driver's calls, for one device whose context is current on this thread.

    names   its constants and structures
    ordinal  of the device
    """

    def __init__(self, bindings: Any, ordinal: int) -> None:
        """bindings: cuda.bindings.driver"""
        self.names = bindings
        self.ordinal = ordinal

    def __call__(self, call: str, *args: Any) -> Any:
        """Return what the call gives, or None. Raises OutOfMemory, Refused, and DeviceLost for every other error."""
        status, *given = getattr(self.names, call)(*args)
        if status == self.names.CUresult.CUDA_SUCCESS:
            return given[0] if len(given) == 1 else tuple(given) or None
        if status == self.names.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(f"{call}: {status.name}")
        if status.name in REFUSALS:
            raise Refused(f"{call}: {status.name}")
        raise DeviceLost(f"{call}: {status.name}; what the GPU holds is uncertain, so restart infd if that persists")

    def may_wait(self) -> bool:
        """Say whether this thread may wait for the device: it has a context, and is not capturing."""
        # A thread that captures has torch initialized; before that, torch cannot be asked.
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        return not capturing and int(self("cuCtxGetCurrent")) != 0


def find(device: torch.device) -> Driver | str:
    """Return the driver of a GPU on which memory can be given back in place, or why there is none."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm, whose driver infd does not call"
    try:
        bindings = _bindings()
    except ImportError as error:
        return ABSENT.format(error)
    torch.cuda.mem_get_info(device)  # makes the device's context, and makes it this thread's
    driver = Driver(bindings, device.index)
    wanted = bindings.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    if not driver("cuDeviceGetAttribute", wanted, driver("cuDeviceGet", driver.ordinal)):
        return "this GPU's driver cannot map memory to addresses that stay"
    return driver


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver
