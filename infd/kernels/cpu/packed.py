"""Forms that keep a checkpoint's numbers: integers in groups or rows, and fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from infd.groups import Groups
from infd.kernels.cpu.groups import Kept
from infd.kernels.cpu.library import INT, POINTER, Library
from infd.kernels.cpu.linear import HALF, PANEL, Int8, Kernels, Panels, columns
from infd.kernels.reference import float8
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.groups import GroupedRows


class Float8Panels(Panels):
    """A matrix of fp8 in panels: bytes, and float32 scales of `groups.inputs` inputs; layout in `native/float8.h`."""

    def __init__(
        self,
        kernels: Kernels,
        outputs: int,
        inputs: int,
        groups: Groups,
        activations: torch.dtype,
        encode: Callable[[int, int, int, int], None],
    ) -> None:
        """Describe the panels.

        encode  function that converts bytes of E4M3 and scales, in place, to those that panels store
        """
        self.groups, self.layout, self._encode = groups, groups.inputs, encode
        self._steps = ceil_div(inputs, groups.inputs)
        panel = (self._steps, 1 + groups.inputs // 4, PANEL)
        super().__init__(kernels, outputs, inputs, panel, activations=activations)

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        quantized = float8.quantize(rows)
        self.place_groups(storage, first, quantized._replace(scales=quantized.scales.expand(-1, self._steps)))

    def packing(self, storage: Tensor, dtype: torch.dtype | str) -> None:
        """Return None: no native code packs rows."""

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        count, size = len(rows.integers), self.groups.inputs
        codes = F.pad(rows.integers, (0, self._steps * size - self._inputs), value=-128) ^ -128  # indices start at -128
        panel, column = columns(first, count)
        spoilt = (codes & 127 == 127).view(count, self._steps, size).any(2)  # kernels treat NaN as a finite number
        scales = rows.scales.masked_fill(spoilt, torch.nan).contiguous()
        self._encode(codes.data_ptr(), codes.numel(), scales.data_ptr(), scales.numel())
        storage[panel, :, 0, column] = scales.view(torch.int32)
        storage[panel, :, 1:, column] = codes.view(torch.int32).view(count, self._steps, size // 4)


class Float8:
    """Forms of fp8 matrices, which multiply bfloat16."""

    SIZES = (128, 64, 32)  # inputs of a step: scales of larger groups are repeated

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._kernels = Kernels("float8", HALF, library, packs=False)
        self._encode = library.kernel("encode_float8", POINTER, INT, POINTER, INT)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> Float8Panels | str:
        """Return the form of a matrix of `groups`, or the reason that there is none."""
        if dtype not in self._kernels.multiply:
            return "the form of fp8 computes in bfloat16"
        shared = self.SIZES[0] if groups.inputs >= inputs else groups.inputs
        size = next((each for each in self.SIZES if shared % each == 0), 0)
        if groups.table != "e4m3" or groups.scales != "F32" or groups.zeros or groups.order or not size:
            return "the form of fp8 has E4M3, and float32 scales of 32 inputs"
        return Float8Panels(self._kernels, outputs, inputs, groups._replace(inputs=size), dtype, self._encode)


class QuantizedFloat8:
    """Forms of weights that are quantized to fp8 while loading, with a scale for each row; inputs have one by token."""

    numbers = (8, "e4m3")
    rounds = float8.BY_TOKEN

    def __init__(self, library: Library | None = None) -> None:
        self._forms = Float8(library)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Float8Panels:
        form = self._forms.form(outputs, inputs, dtype, Groups(8, inputs, "F32", table="e4m3"))
        assert not isinstance(form, str)
        return form


class Exact:
    """Forms that keep a checkpoint's numbers, and do not quantize activations. Implements families.matrices.Packed."""

    def __init__(self, library: Library | None = None) -> None:
        self._float8 = Float8(library)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> Panels | str:
        if groups.table == "e4m3":
            return self._float8.form(outputs, inputs, dtype, groups)
        return "products with it would quantize activations"


class Packed:
    """Forms of matrices that a checkpoint stores as integers and scales. Implements families.matrices.Packed.

    Integers may be indices of a table, so MXFP4, NVFP4 and fp8 are such matrices too. Activations are quantized to int8
    for each product, except with fp8. Matrices that no form can keep are decoded.
    """

    def __init__(self, library: Library | None = None) -> None:
        self._groups, self._int8, self._float8 = Kept(library), Int8(library), Float8(library)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> Panels | str:
        if groups.bits == 8 and groups.table:
            return self._float8.form(outputs, inputs, dtype, groups)
        rows = groups.inputs >= inputs and not (groups.zeros or groups.minima or groups.order)
        if groups.bits == 8 and rows and groups.scales != "I8" and inputs <= Int8.MOST_INPUTS:
            return self._int8.form(outputs, inputs, dtype)
        return self._groups.form(outputs, inputs, dtype, groups)
