"""Matrices of integers in groups of inputs, in panels: layout in `native/groups.h`.

Integers of four bits are quantized when `place` stores rows; `place_groups` stores integers of four, six and eight bits
as a checkpoint has them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from infd.groups import BLOCK, Groups
from infd.input_scheme import InputScheme
from infd.kernels.cpu.library import INT, POINTER, Library, address
from infd.kernels.cpu.linear import FLOATS, PANEL, Kernels, Panels, columns
from infd.kernels.families.matrices import SCALE_TYPES, Packing
from infd.kernels.reference import mxfp4
from infd.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from infd.groups import GroupedRows

GROUP = 32  # inputs of a step are a multiple of this; inputs that share a scale if weights are quantized while loading
MOST = 4 * GROUP  # inputs of a step: scales of larger groups are repeated
TYPES = ("BF16", "F16", "F32", "I8")  # of scales, in the order of Layout::Scales
TABLES = ("", "e2m1", "iq4_nl")  # in the order of TABLES in native/groups.h
KINDS = MappingProxyType({8: len(TABLES), 6: len(TABLES) + 1})  # Layout::BYTES and SIXES, by bits
MXFP4 = Groups(4, GROUP, "BF16", table="e2m1")
# GGUF's types of blocks, and the groups that native/pack_blocks.cpp makes of them.
BLOCKS = MappingProxyType(
    {
        "Q4_0": Groups(4, GROUP, "F16"),
        "Q4_1": Groups(4, GROUP, "F16", minima=True),
        "Q5_0": Groups(6, GROUP, "F16"),
        "Q5_1": Groups(6, GROUP, "F16", minima=True),
        "Q8_0": Groups(8, GROUP, "F16"),
        "Q2_K": Groups(4, 16, "I8", minima=True),
        "Q3_K": Groups(4, 16, "I8"),
        "Q4_K": Groups(4, GROUP, "I8", minima=True),
        "Q5_K": Groups(6, GROUP, "I8", minima=True),
        "Q6_K": Groups(6, 16, "I8"),
        "IQ4_NL": Groups(4, GROUP, "F16", table="iq4_nl"),
        "IQ4_XS": Groups(4, GROUP, "I8", table="iq4_nl"),
        "MXFP4": MXFP4,
    }
)


class GroupPanels(Panels):
    """A matrix of integers in groups, or of indices of a table, in panels."""

    quantizes = InputScheme("int8", GROUP)

    def __init__(
        self,
        kernels: Kernels,
        outputs: int,
        inputs: int,
        groups: Groups,
        activations: torch.dtype,
        blocks: Mapping[str, Callable[..., None]] = MappingProxyType({}),
    ) -> None:
        """Describe the panels.

        groups  `inputs` is 16 or a multiple of GROUP up to MOST; 16 or GROUP if scales are I8
        blocks  functions that pack GGUF's blocks with such groups, by type
        """
        self.groups, self._blocks = groups, blocks
        shared = groups.scales == "I8"
        self._size = BLOCK if shared else max(groups.inputs, GROUP)  # inputs of a step
        self._sets = self._size // groups.inputs  # scales of an output in a step
        assert groups.inputs in ((16, GROUP) if shared else (16, GROUP, 2 * GROUP, 3 * GROUP, MOST))
        self.layout = (
            TYPES.index(groups.scales)
            | groups.zeros << 2
            | (groups.order != "") << 3
            | (KINDS[groups.bits] if groups.bits in KINDS else TABLES.index(groups.table)) << 4
            | (groups.inputs < GROUP) << 7
            | groups.minima << 8
            | self._size // GROUP - 1 << 9
        )
        numbers = self._sets * PANEL * SCALE_TYPES[groups.scales].itemsize // 4  # words of a step's scales
        self._to_scales = PANEL // 2 * (1 + groups.minima) if shared else 0
        self._to_minima = self._to_scales + numbers
        self._to_zeros = self._to_minima + numbers * groups.minima
        self._to_lines = self._to_zeros + self._sets * PANEL // 4 * groups.zeros
        self._lines = self._size * groups.bits // 32
        self._steps = ceil_div(inputs, self._size)
        super().__init__(kernels, outputs, inputs, (), activations=activations)
        self._order = round_up(inputs, 16) if groups.order else 0  # words of the table of reordered inputs
        self.reordered = bool(groups.order)
        step = self._to_lines + self._lines * PANEL
        self.shape = (self._order + ceil_div(outputs, PANEL) * self._steps * step,)
        self._panel_bytes = self._steps * step * self.dtype.itemsize

    @property
    def panel_bytes(self) -> int:
        return self._panel_bytes

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        if self.layout:
            assert self.groups == MXFP4
            self.place_groups(storage, first, mxfp4.quantize(rows))
        else:
            super().place(storage, first, rows)

    def packing(self, storage: Tensor, dtype: torch.dtype | str) -> Packing | None:
        if not isinstance(dtype, str):
            return None if self.layout else super().packing(storage, dtype)
        if (kernel := self._blocks.get(dtype)) is None:
            return None
        return Packing(address(kernel), storage.data_ptr(), self._outputs, self._inputs, PANEL)

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        panel, column = columns(first, len(rows.integers))
        steps = storage[self._order :].view(-1, self._steps, self._to_lines + self._lines * PANEL)

        def put(begin: int, end: int, numbers: Tensor) -> None:
            """Store numbers [n, any], padded, in words [begin, end) of each step."""
            stored = steps[..., begin:end].view(numbers.dtype).unflatten(-1, (-1, PANEL))
            padded = F.pad(numbers, (0, self._steps * stored.shape[2] - numbers.shape[1]))
            stored[panel, :, :, column] = padded.unflatten(1, (self._steps, -1))

        if rows.shared is not None:
            put(0, self._to_scales, rows.shared)
        put(self._to_scales, self._to_minima, rows.scales)
        if self.groups.minima:
            minima = torch.zeros_like(rows.scales) if rows.minima is None else rows.minima
            put(self._to_minima, self._to_zeros, minima)
        if self.groups.zeros:
            zeros = torch.zeros_like(rows.scales, dtype=torch.int8) if rows.zeros is None else rows.zeros
            put(self._to_zeros, self._to_lines, zeros)
        put(self._to_lines, steps.shape[-1], self._words(rows.integers))
        if self._order:
            assert rows.order is not None
            storage[: self._inputs] = rows.order

    def _words(self, integers: Tensor) -> Tensor:
        """Return integers [n, in] as the words of lines, [n, lines]."""
        padded = F.pad(integers, (0, self._steps * self._size - self._inputs))
        if self.groups.bits == 8:
            return (padded ^ -128).view(torch.int32)
        if self.groups.bits == 6:
            quads = (padded + 32).view(torch.uint8).unflatten(1, (-1, 4, 4))
            lower, upper = quads & 15, quads >> 4
            lines = (
                upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6,
                lower[:, :, 0] | lower[:, :, 1] << 4,
                lower[:, :, 2] | lower[:, :, 3] << 4,
            )
            return torch.stack(lines, 2).view(torch.int32).flatten(1)
        fields = (padded if self.groups.minima else padded + 8).view(torch.uint8).unflatten(1, (-1, 2, 4))
        return (fields[:, :, 0] | fields[:, :, 1] << 4).contiguous().view(torch.int32).squeeze(-1)


class Int4:
    """Forms of matrices that are quantized to int4 while loading, with a bfloat16 scale for each GROUP inputs."""

    numbers = (4, "")

    def __init__(self, library: Library | None = None) -> None:
        self._kernels = Kernels("groups", tuple(FLOATS), library, quantizes=True)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> GroupPanels:
        return GroupPanels(self._kernels, outputs, inputs, Groups(4, GROUP, "BF16"), dtype)


class QuantizedMXFP4:
    """Forms of weights that are quantized to MXFP4 while loading."""

    numbers = (4, "e2m1")

    def __init__(self, library: Library | None = None) -> None:
        self._kernels = Kernels("groups", tuple(FLOATS), library, quantizes=True)

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> GroupPanels:
        return GroupPanels(self._kernels, outputs, inputs, MXFP4, dtype)


class Kept:
    """Forms that keep a checkpoint's integers in groups."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._kernels = Kernels("groups", tuple(FLOATS), library, quantizes=True)
        self._blocks = {kind: library.kernel(f"pack_blocks_{kind}", POINTER, INT, POINTER, INT, INT) for kind in BLOCKS}

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> GroupPanels | str:
        """Return the form of a matrix of `groups`, or the reason that there is none."""
        if groups.bits not in (4, 6, 8) or (groups.bits == 6 and groups.table):
            return f"no form has integers of {groups.bits} bits"
        if groups.table not in TABLES:
            return f"no form has the table {groups.table}"
        sizes = (GROUP, 16) if groups.scales == "I8" else (MOST, 2 * GROUP, GROUP, 16)
        together = groups.inputs
        if together >= inputs:  # one scale a row: it is repeated for each step
            together = min((each for each in sizes if each >= max(inputs, GROUP)), default=sizes[0])
        size = next((each for each in sizes if together % each == 0), 0)
        if not size:
            return "no form has groups of fewer than 16 inputs, or of no multiple of 16"
        blocks = {
            kind: kernel for kind, kernel in self._blocks.items() if BLOCKS[kind] == groups and size == groups.inputs
        }
        return GroupPanels(self._kernels, outputs, inputs, groups._replace(inputs=size), dtype, blocks)
