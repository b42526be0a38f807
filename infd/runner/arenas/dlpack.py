"""Make a tensor over existing memory of a known device, through DLPack.

torch.as_tensor over __cuda_array_interface__ asks the driver for the device of a pointer, which the driver may not know
for mapped addresses. A DLPack capsule states the device.

Source: dlpack.h 0.8, DLManagedTensor.
"""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS: Final = MappingProxyType({"cpu": 1, "cuda": 2})  # values of DLDeviceType
UNSIGNED: Final = 1  # kDLUInt of DLDataTypeCode
NAME: Final = b"dltensor"  # name of a capsule from which no tensor was made yet


class _Managed(ctypes.Structure):
    """DLManagedTensor, with the fields of its DLTensor, DLDevice and DLDataType inlined, and after it the shape."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("ordinal", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def tensor_at(address: int, size: int, device: torch.device, owner: object) -> Tensor:
    """Return `size` bytes of a device's memory as a tensor [size] uint8, without a copy.

    owner  an object that is kept alive until the tensor and its views are freed

    Raises torch's error if torch rejects the memory.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    # The deleter is C's free, because a Python function must not be called where torch calls it: on any thread, and
    # while an exception is raised.
    place = libc.malloc(ctypes.c_size_t(ctypes.sizeof(_Managed)))
    ctypes.memset(place, 0, ctypes.sizeof(_Managed))
    managed = _Managed.from_address(place)
    managed.data, managed.size = address, size
    managed.kind, managed.ordinal = KINDS[device.type], device.index or 0
    managed.code, managed.bits, managed.lanes = UNSIGNED, 8, 1
    managed.dimensions, managed.shape = 1, place + _Managed.size.offset
    managed.deleter = ctypes.cast(libc.free, ctypes.c_void_p)
    tensor: Tensor = from_dlpack(_capsule(place, NAME, None))
    tensor.untyped_storage().owner = owner  # type: ignore[attr-defined]  # torch frees the attribute with the memory
    return tensor
