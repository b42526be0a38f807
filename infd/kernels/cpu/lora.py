"""LoRA in C++: `native/lora.cpp`. One call per product, for any number of adapters in the step."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.adapters import Groups, LowRank
    from infd.kernels.families.host import Upload


class _Part(ctypes.Structure):
    _fields_ = [("b", POINTER), ("ranks", INT), ("rank", INT), ("outputs", INT), ("output", INT)]


class Group(ctypes.Structure):
    """The C structure LoraGroup of `native/lora.h`."""

    _fields_ = [
        ("rows", POINTER),
        ("count", INT),
        ("a", POINTER),
        ("ranks", INT),
        ("parts", ctypes.POINTER(_Part)),
        ("part_count", INT),
    ]


class Lora:
    """Implements families.adapters.Lora."""

    def __init__(self, library: Library | None = None) -> None:
        self._add = (library or Library()).kernel(
            "lora", INT, INT, POINTER, INT, POINTER, INT, INT, POINTER, POINTER, INT
        )

    def add(self, y: Tensor, x: Tensor, groups: Groups, upload: Upload | None = None) -> None:
        structures = (Group * len(groups))(*(structure(rows, low, low.a.shape[0]) for rows, low in groups))
        x = x if x.stride(1) == 1 else x.contiguous()
        half = x.dtype is torch.bfloat16
        addresses = (y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), x.shape[1])
        self._add(half, y.dtype is torch.float32, *addresses, None, structures, len(groups))

    def add_rows(self, y: Tensor, tokens: Tensor, groups: Groups, upload: Upload | None = None) -> None:
        structures = (Group * len(groups))(*(structure(rows, low, low.a.shape[1]) for rows, low in groups))
        half = groups[0][1].a.dtype is torch.bfloat16
        addresses = (y.data_ptr(), y.stride(0), None, 0, 0)
        self._add(half, y.dtype is torch.float32, *addresses, tokens.data_ptr(), structures, len(groups))

    def captured(self, size: int, device: torch.device) -> None:
        """Return None: steps on a CPU are never captured."""


def structure(rows: Tensor, low: LowRank, ranks: int) -> Group:
    """Return the C structure for one adapter and its rows; `rows` and `low`'s tensors must outlive the structure.

    The matrices of experts must be contiguous.
    """
    parts = (_Part * len(low.parts))(
        *(_Part(part.b.data_ptr(), part.b.shape[-1], part.rank, part.b.shape[-2], part.output) for part in low.parts)
    )
    return Group(rows.data_ptr(), len(rows), low.a.data_ptr(), ranks, parts, len(low.parts))
