"""Weight matrices in panels: layout in `native/panels.h`, products in `native/products.h`.

Weights stay bfloat16, or are int8 with a scale for each row: quantized when `place` stores them, or stored by
`place_groups` as the checkpoint quantized them. `groups.py` and `packed.py` have the other forms. Row i of a product
x W^T is bitwise determined by W and row i of x, whatever the numbers of rows and of threads.
"""

from __future__ import annotations

import ctypes
import math
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from infd.groups import Groups
from infd.input_scheme import INT8_BY_TOKEN
from infd.kernels.cpu.inputs import InputRounding, Inputs
from infd.kernels.cpu.library import INT, POINTER, Library, address
from infd.kernels.cpu.product import DecoderTable, Product, product
from infd.kernels.families.matrices import Packing
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.groups import GroupedRows
    from infd.input_scheme import InputScheme
    from infd.kernels.families.inputs import Rounding

PANEL = 64  # outputs in a panel
FLOATS = {torch.bfloat16: "bf16", torch.float32: "float"}
HALF = (torch.bfloat16,)
MULTIPLY = (POINTER, INT, INT, POINTER, INT, INT, POINTER, POINTER, INT, INT, INT, POINTER)  # see `native/product.h`


class Kernels:
    """The compiled functions for one kind of panels, by the dtype of the rows that they read or write."""

    def __init__(
        self,
        kind: str,
        dtypes: Sequence[torch.dtype],
        library: Library | None,
        *,
        packs: bool = True,
        quantizes: bool = False,
    ) -> None:
        """Find the functions.

        packs      whether there are kernels that pack rows of floats
        quantizes  whether there are kernels that quantize inputs, and multiply quantized ones
        """
        library = library or Library()
        names = {dtype: f"{kind}_{FLOATS[dtype]}" for dtype in dtypes}
        self.pack: dict[torch.dtype | str, Callable[..., None]] = {
            d: library.kernel(f"pack_{name}", POINTER, INT, INT, POINTER, INT, INT)
            for d, name in names.items()
            if packs
        }
        self.unpack = {
            d: library.kernel(f"unpack_{name}", POINTER, POINTER, INT, INT, POINTER, INT, INT)
            for d, name in names.items()
        }
        self.multiply = {d: library.kernel(f"multiply_{name}", *MULTIPLY) for d, name in names.items()}
        self._in_two_steps = (
            (
                {d: address(library.kernel(f"quantize_{name}")) for d, name in names.items()},
                address(library.kernel(f"multiply_quantized_{kind}")),
                library.kernel(f"quantized_bytes_{kind}", INT, INT, ctypes.POINTER(INT)),
            )
            if quantizes
            else None
        )

    def describe_steps(self, product: Product, activations: torch.dtype) -> None:
        """Set the functions of a product that quantize its inputs and multiply them, if inputs are quantized."""
        if self._in_two_steps is not None:
            quantize, multiply, quantized_bytes = self._in_two_steps
            size = INT()
            quantized_bytes(product.inputs, product.layout, ctypes.byref(size))
            product.quantize, product.multiply_quantized = quantize[activations], multiply
            product.quantized_bytes = size.value


class Panels:
    """A matrix in panels of PANEL outputs. Implements `Form`.

    panel        shape of one panel, in elements of `dtype`
    activations  dtype of x in products
    layout       argument of the kernels that support several layouts; else 0
    reordered    whether a table of reordered inputs precedes the panels, so that these cannot be multiplied alone
    """

    layout = 0
    reordered = False
    quantizes: InputScheme | None = None

    def __init__(
        self,
        kernels: Kernels,
        outputs: int,
        inputs: int,
        panel: tuple[int, ...],
        dtype: torch.dtype = torch.int32,
        activations: torch.dtype = torch.bfloat16,
    ) -> None:
        assert activations in kernels.multiply
        self._kernels = kernels
        self._outputs, self._inputs, self._activations = outputs, inputs, activations
        self.shape = (ceil_div(outputs, PANEL), *panel)
        self.dtype = dtype
        self.least_rows = 1
        self.wide = torch.float32

    @property
    def panel_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def rows(self, storage: Tensor, first: int, count: int) -> None:
        """Return None: panels do not contain checkpoint rows unchanged."""

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        pack = self._kernels.pack
        if rows.dtype not in pack:
            rows = rows.to(list(pack)[-1])
        rows = rows.contiguous()
        assert rows.shape[1] == self._inputs
        assert first + rows.shape[0] <= self._outputs
        pack[rows.dtype](storage.data_ptr(), self._outputs, self._inputs, rows.data_ptr(), first, rows.shape[0])

    def packing(self, storage: Tensor, dtype: torch.dtype | str) -> Packing | None:
        if (kernel := self._kernels.pack.get(dtype)) is None:
            return None
        return Packing(address(kernel), storage.data_ptr(), self._outputs, self._inputs, PANEL)

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        rows, inputs = x.shape
        assert (inputs, x.dtype) == (self._inputs, self._activations)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(rows, self._outputs, dtype=self.wide if wide else x.dtype)
        self._kernels.multiply[x.dtype](
            x.data_ptr(),
            x.stride(0),
            rows,
            storage.data_ptr(),
            self._outputs,
            inputs,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self._outputs,
            out.dtype is torch.float32,
            self.layout,
            None,
        )
        return out

    def product(self, storage: Tensor, bias: Tensor | None) -> Product:
        kernel = self._kernels.multiply[self._activations]
        found = product(kernel, storage, bias, self._outputs, self._inputs, self.layout)
        if not self.reordered:
            self._kernels.describe_steps(found, self._activations)
        return found

    def table(self, storage: Tensor, scale: float) -> DecoderTable:
        look_up = address(self._kernels.unpack[self._activations])
        return DecoderTable(look_up, storage.data_ptr(), self._outputs, self._inputs, self.layout, scale)

    def look_up(self, tokens: Tensor, storage: Tensor) -> Tensor:
        tokens = tokens.contiguous()
        out = torch.empty(tokens.shape[0], self._inputs, dtype=self._activations)
        self._kernels.unpack[self._activations](
            out.data_ptr(),
            storage.data_ptr(),
            self._outputs,
            self._inputs,
            tokens.data_ptr(),
            tokens.shape[0],
            self.layout,
        )
        return out


class Matrices:
    """Forms of bfloat16 weights: a word contains an output's weights for two inputs."""

    numbers = None

    def __init__(self, library: Library | None = None) -> None:
        self._kernels = Kernels("bf16", HALF, library)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Panels:
        return Panels(self._kernels, outputs, inputs, (ceil_div(inputs, 2), PANEL, 2), torch.bfloat16, dtype)


class CompressedPanels(Panels):
    """A matrix of bfloat16 in panels and their rests; layout in `native/compressed.h`."""

    def __init__(
        self, kernels: Kernels, outputs: int, inputs: int, panel_bytes: int, rest_bytes: int, activations: torch.dtype
    ) -> None:
        """Describe the panels. panel_bytes, rest_bytes: of each panel, and of its rest behind all panels."""
        super().__init__(kernels, outputs, inputs, ((panel_bytes + rest_bytes) // 2,), torch.bfloat16, activations)
        self._panel_bytes = panel_bytes

    @property
    def panel_bytes(self) -> int:
        return self._panel_bytes


class Compressed:
    """Forms of bfloat16 weights in 12 bits, without loss; see `native/compressed.h`."""

    numbers = None

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._kernels = Kernels("compressed", HALF, library)
        self._bytes = library.kernel("compressed_bytes", INT, ctypes.POINTER(INT), ctypes.POINTER(INT))

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Panels:
        panel, rest = INT(), INT()
        self._bytes(inputs, ctypes.byref(panel), ctypes.byref(rest))
        return CompressedPanels(self._kernels, outputs, inputs, panel.value, rest.value, dtype)


class Floats:
    """Forms of float32 weights: a word is an output's weight for one input."""

    numbers = None

    def __init__(self, library: Library | None = None) -> None:
        self._kernels = Kernels("float", (torch.float32,), library)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Panels:
        return Panels(self._kernels, outputs, inputs, (inputs, PANEL), torch.float32, dtype)


class Int8Panels(Panels):
    """A matrix of int8 in panels: a line of scales, a line of the sums' initial values, then the lines of weights."""

    quantizes = INT8_BY_TOKEN
    _rounding: InputRounding | None = None  # of inputs with a stored scale; `layout` is its address

    def stored(self, rounding: Rounding) -> Int8Panels | str:
        """See families.inputs.QuantizesStored."""
        kernel, scheme, scale, zero = rounding
        found = kernel.structure(scheme, scale, zero) if isinstance(kernel, Inputs) else None
        if found is None or scheme.numbers != "int8" or scale is None or scheme.inputs:
            return f"the form of int8 does not quantize inputs as {scheme}"
        if self._inputs > Int8.MOST_STORED:
            return f"sums of {self._inputs} products with {scheme} might overflow"
        form = copy(self)
        form.quantizes, form._rounding, form.layout = scheme, found, ctypes.addressof(found)
        return form

    @property
    def groups(self) -> Groups:
        return Groups(8, self._inputs, "F32")

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        integers = rows.integers
        panel, column = columns(first, len(integers))
        storage[panel, 0, column] = rows.scales.contiguous().view(torch.int32).squeeze(1)
        storage[panel, 1, column] = (integers.sum(1) * -128).to(torch.int32)  # see OFFSET in native/quantized.h
        words = F.pad(integers, (0, -integers.shape[1] % 4)).contiguous().view(torch.int32)
        storage[panel, Int8.HEADER :, column] = words


class Int8:
    """Forms of int8 weights: a word contains an output's weights for four inputs; see `native/quantized.h`."""

    numbers = (8, "")
    HEADER = 2  # lines of a panel before the weights: the scales, and the sums' initial values
    # Weights are -128 to 127, inputs -127 to 127: the sum of at most this many of their products always fits an int32.
    MOST_INPUTS = 2**31 // (127 * 128)
    MOST_STORED = 2**31 // (255 * 128)  # with stored scales: inputs minus a zero point are -255 to 255

    def __init__(self, library: Library | None = None) -> None:
        self._kernels = Kernels("int8", tuple(FLOATS), library, quantizes=True)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Panels:
        assert inputs <= self.MOST_INPUTS
        panel = (self.HEADER + ceil_div(inputs, 4), PANEL)
        return Int8Panels(self._kernels, outputs, inputs, panel, activations=dtype)


def columns(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the panels of outputs [first, first + count), and their columns in the panels."""
    outputs = torch.arange(first, first + count)
    return outputs // PANEL, outputs % PANEL
