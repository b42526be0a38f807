"""A product that C code computes by itself: which kernel, and what it is to be told."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from infd.kernels.cpu.library import INT, POINTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Product(ctypes.Structure):
    """StackProduct of `native/stack.h`."""

    _fields_ = (("multiply", POINTER), ("weights", POINTER), ("bias", POINTER), ("outputs", INT), ("inputs", INT))


@runtime_checkable
class Addressable(Protocol):
    """A form of matrices whose products have an address in C."""

    def product(self, kept: Tensor, bias: Tensor | None) -> Product: ...


def product(kernel: Callable[..., Any], kept: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> Product:
    """Return the product of [T, inputs] with a matrix [outputs, inputs], kept in the form that `kernel` reads."""
    return Product(
        multiply=ctypes.cast(kernel, POINTER).value,  # type: ignore[arg-type]  # a kernel is a ctypes function
        weights=kept.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        outputs=outputs,
        inputs=inputs,
    )
