"""Rounding of products' inputs in C++: `native/inputs.cpp`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library
from infd.kernels.reference import inputs

if TYPE_CHECKING:
    from torch import Tensor

    from infd.input_scheme import InputScheme


NUMBERS = ("e4m3", "int8", "e2m1")  # in the order of InputRounding::Numbers


class InputRounding(ctypes.Structure):
    """The C structure InputRounding of `native/inputs.h`."""

    _fields_ = (("scale", POINTER), ("zero", POINTER), ("group", INT), ("numbers", INT), ("powers", INT))


class Inputs(inputs.Inputs):
    """Implements families.inputs.Inputs. Dynamic zero points are left to the reference."""

    def __init__(self, library: Library | None = None) -> None:
        self._round = (library or Library()).kernel("round_inputs", INT, POINTER, INT, POINTER, INT, INT, POINTER)

    def round(self, x: Tensor, scheme: InputScheme, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        rounding = self.structure(scheme, scale, zero)
        if rounding is None:
            return super().round(x, scheme, scale, zero)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        half = x.dtype is torch.bfloat16
        self._round(half, x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape, ctypes.addressof(rounding))
        return out

    def structure(self, scheme: InputScheme, scale: Tensor | None, zero: Tensor | None) -> InputRounding | None:
        """Describe the rounding for native code; `scale` and `zero` must outlive the structure. None: not supported."""
        if scale is None and scheme.zeros:
            return None
        return InputRounding(
            scale=None if scale is None else scale.data_ptr(),
            zero=None if zero is None else zero.data_ptr(),
            group=scheme.inputs,
            numbers=NUMBERS.index(scheme.numbers),
            powers=scheme.powers,
        )
