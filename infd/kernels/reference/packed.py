"""Forms that keep a checkpoint's integers in rows, in plain torch: the oracle of the GPU's packed forms.

One tensor of bytes stores a matrix as sections, each aligned to 16 bytes: integers, scales, minima, zero points, shared
scales, and the order of the inputs. Rows of integers are padded to a multiple of 32 inputs. In four bits a byte stores
inputs i and i + 16 of 32, the former in the lower bits, so that 16 consecutive bytes belong to 16 consecutive inputs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn import functional as F

from infd.groups import BLOCK
from infd.kernels.families.matrices import LEAST_ROWS, SCALE_TYPES
from infd.rounding import ceil_div, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from infd.groups import GroupedRows, Groups
    from infd.input_scheme import InputScheme

STEP: Final = 32  # inputs that are packed together
ALIGNED: Final = 16  # bytes to which sections are aligned
TABLES: Final = MappingProxyType(
    {
        "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
        "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    }
)


class Section(NamedTuple):
    """A part of the storage: its first byte, and the shape and dtype of its contents."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, storage: Tensor) -> Tensor:
        return storage[self.first : self.first + self.bytes].view(self.dtype).view(self.shape)


class PackedRows:
    """A matrix of integers in groups, in rows. Implements families.matrices.Form and Grouped."""

    dtype = torch.uint8
    least_rows = LEAST_ROWS
    quantizes: InputScheme | None = None

    def __init__(self, outputs: int, inputs: int, groups: Groups, activations: torch.dtype) -> None:
        """Set up. `why_not` must have returned ""."""
        size = min(groups.inputs, round_up(inputs, STEP))
        self.groups = groups._replace(inputs=size)
        self.outputs, self.inputs, self.activations = outputs, inputs, activations
        self.wide = activations
        self.padded = round_up(inputs, STEP)
        counts = outputs, ceil_div(inputs, size)
        kind = SCALE_TYPES[groups.scales]
        blocks = ceil_div(inputs, BLOCK) * (1 + groups.minima) if groups.scales == "I8" else 0
        wanted = {
            "integers": ((outputs, self.padded // (2 if groups.bits == 4 else 1)), torch.uint8),
            "scales": (counts, kind),
            "minima": (counts if groups.minima else (0,), kind),
            "zeros": (counts if groups.zeros else (0,), torch.int8),
            "shared": ((outputs, blocks) if blocks else (0,), torch.float16),
            "order": ((inputs,) if groups.order else (0,), torch.int32),
        }
        self.sections: dict[str, Section] = {}
        end = 0
        for name, (shape, dtype) in wanted.items():
            section = Section(end, shape, dtype)
            self.sections[name] = section
            end = round_up(end + section.bytes, ALIGNED)
        self.shape = (end,)

    def section(self, name: str, storage: Tensor) -> Tensor | None:
        """Return a section's contents; None if the matrix has none."""
        found = self.sections[name]
        return found.of(storage) if found.bytes else None

    def rows(self, storage: Tensor, first: int, count: int) -> None:
        """Return None: rows are not stored as floats."""

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        raise TypeError("packed rows take integers only")  # a `kept` parameter refuses other rows before

    def place_groups(self, storage: Tensor, first: int, rows: GroupedRows) -> None:
        there = slice(first, first + len(rows.integers))
        fields = F.pad(rows.integers, (0, self.padded - self.inputs))
        if self.groups.bits == 4:
            nibbles = (fields if self.groups.minima else fields + 8).view(torch.uint8).unflatten(1, (-1, 2, STEP // 2))
            packed = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).flatten(1)
        else:
            packed = (fields ^ -128 if self.groups.table else fields).view(torch.uint8)
        contents = {"integers": packed, "scales": rows.scales, "minima": rows.minima, "zeros": rows.zeros}
        for name, content in {**contents, "shared": rows.shared}.items():
            if (section := self.section(name, storage)) is not None:
                section[there] = 0 if content is None else content.to(storage.device)
        if (order := self.section("order", storage)) is not None:
            assert rows.order is not None
            order.copy_(rows.order)

    def decoded(self, storage: Tensor, rows: Tensor | slice) -> Tensor:
        """Return some rows of the matrix, float32 [n, inputs], in the checkpoint's order of inputs."""
        numbers = self._numbers(self.sections["integers"].of(storage)[rows])[:, : self.inputs]

        def spread(name: str) -> Tensor | None:
            found = self.section(name, storage)
            if found is None:
                return None
            return found[rows].float().repeat_interleave(self.groups.inputs, 1)[:, : self.inputs]

        if (zeros := spread("zeros")) is not None:
            numbers = numbers - zeros
        scales, minima = spread("scales"), spread("minima")
        assert scales is not None
        if (shared := self.section("shared", storage)) is not None:
            wide = shared[rows].float().unflatten(1, (-1, 1 + self.groups.minima)).repeat_interleave(BLOCK, 1)
            scales = scales * wide[:, : self.inputs, 0]
            minima = None if minima is None else minima * wide[:, : self.inputs, 1]
        numbers = numbers * scales
        if minima is not None:
            numbers = numbers + minima
        if (order := self.section("order", storage)) is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, order.long(), numbers)
        return numbers

    def _numbers(self, stored: Tensor) -> Tensor:
        """Return the numbers of rows of the section `integers`, float32."""
        groups = self.groups
        if groups.table == "e4m3":
            return stored.view(torch.float8_e4m3fn).float()
        if groups.bits != 4:
            return stored.view(torch.int8).float()
        halves = stored.unflatten(1, (-1, STEP // 2))
        fields = torch.stack((halves & 15, halves >> 4), 2).flatten(1)
        if groups.table:
            return torch.tensor(TABLES[groups.table], dtype=torch.float32, device=stored.device)[fields.int()]
        return fields.float() if groups.minima else fields.float() - 8

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        return F.linear(x, self.decoded(storage, slice(None)).to(x.dtype), bias)

    def look_up(self, tokens: Tensor, storage: Tensor) -> Tensor:
        return self.decoded(storage, tokens).to(self.activations)


def why_not(inputs: int, groups: Groups) -> str:
    """Return why PackedRows cannot store a matrix of `groups`; "" if it can."""
    if groups.bits not in (4, 6, 8):
        return f"no form has integers of {groups.bits} bits"
    if groups.table not in ("", "e4m3" if groups.bits == 8 else "", *(TABLES if groups.bits == 4 else ())):
        return f"no form has the table {groups.table}"
    if groups.inputs < inputs and groups.inputs % 16:
        return "no form has groups of no multiple of 16 inputs"
    return ""


class Packed:
    """Implements families.matrices.Packed."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> PackedRows | str:
        return why_not(inputs, groups) or PackedRows(outputs, inputs, groups, dtype)
