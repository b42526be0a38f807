"""Products as C structures, for native code that multiplies without returning to Python."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from infd.kernels.cpu.inputs import InputRounding, Inputs
from infd.kernels.cpu.library import FLOAT, INT, POINTER, address

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.recipe import ProductRecipe


class Product(ctypes.Structure):
    """The C structure StackProduct of `native/product.h`."""

    _fields_ = (
        ("multiply", POINTER),
        ("weights", POINTER),
        ("bias", POINTER),
        ("outputs", INT),
        ("inputs", INT),
        ("layout", INT),
        ("panel_bytes", INT),
        ("rounding", ctypes.POINTER(InputRounding)),
        ("quantize", POINTER),
        ("multiply_quantized", POINTER),
        ("quantized_bytes", INT),
    )


class DecoderTable(ctypes.Structure):
    """The C structure DecoderTable of `native/decoder.h`."""

    _fields_ = (
        ("look_up", POINTER),
        ("weights", POINTER),
        ("outputs", INT),
        ("inputs", INT),
        ("layout", INT),
        ("scale", FLOAT),
    )


@runtime_checkable
class Addressable(Protocol):
    """A matrix form whose products native code can compute, and whose rows it can look up.

    reordered    whether a table precedes the panels, which then cannot be multiplied alone
    panel_bytes  bytes from a panel to the next one, unless `reordered`
    """

    @property
    def reordered(self) -> bool: ...

    @property
    def panel_bytes(self) -> int: ...

    def product(self, storage: Tensor, bias: Tensor | None) -> Product:
        """Describe the product with the matrix in `storage`; `storage` and `bias` must outlive the structure."""

    def table(self, storage: Tensor, scale: float) -> DecoderTable:
        """Describe the rows of the matrix in `storage`, multiplied by `scale`; `storage` must outlive the structure."""


class Unaddressable(Exception):
    """A product's form is not Addressable, or native code does not round its inputs."""


def described(recipe: ProductRecipe) -> Product:
    """Describe the product of a recipe, whose tensors must outlive the structure. Raises Unaddressable."""
    if not isinstance(recipe.form, Addressable):
        raise Unaddressable
    found = recipe.form.product(recipe.storage, recipe.bias)
    found.panel_bytes = 0 if recipe.form.reordered else recipe.form.panel_bytes
    if recipe.rounded is not None:
        kernel, scheme, scale, zero = recipe.rounded
        rounding = kernel.structure(scheme, scale, zero) if isinstance(kernel, Inputs) else None
        if rounding is None:
            raise Unaddressable
        found.rounding = ctypes.pointer(rounding)
    return found


def product(
    kernel: Callable[..., Any], storage: Tensor, bias: Tensor | None, outputs: int, inputs: int, layout: int = 0
) -> Product:
    """Describe the product of x [T, inputs] with a matrix [outputs, inputs] in a layout that `kernel` reads."""
    return Product(
        multiply=address(kernel),
        weights=storage.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        outputs=outputs,
        inputs=inputs,
        layout=layout,
    )
