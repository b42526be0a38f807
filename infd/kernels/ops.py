"""The implementations of kernel families chosen for this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import astuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.activation import Activation
    from infd.kernels.families.adapters import Lora
    from infd.kernels.families.attention import Attention
    from infd.kernels.families.draw import Draw
    from infd.kernels.families.matrices import Matrices
    from infd.kernels.families.norm import Norm
    from infd.kernels.families.rope import Rope
    from infd.kernels.families.rows import RowKernels
    from infd.kernels.families.stack import Stack


class Selected(Struct, frozen=True):
    """One row of the selection table: which implementation a family uses, and why not the others."""

    family: str
    chosen: str
    refused: dict[str, str]


@runtime_checkable
class Workspace(Protocol):
    """A family whose kernels compute in memory that stays where it is, beside what each step allocates.

    It holds nothing that outlasts a step, but zeros before the first one, and again when it was given back in a sleep.
    """

    @property
    def workspace_bytes(self) -> int: ...

    def work_in(self, memory: Tensor) -> None:
        """Take that memory, [workspace_bytes] uint8, on the device. Called once, before anything is computed."""


class Ops(Struct, frozen=True, kw_only=True):
    """The chosen implementation of each family, passed to whatever computes."""

    attention: Attention
    linear: Matrices
    vocabulary: Matrices
    norm: Norm
    rope: Rope
    activation: Activation
    stack: Stack
    rows: RowKernels
    draw: Draw
    lora: Lora
    selection: Sequence[Selected]

    def describe(self) -> list[dict[str, Any]]:
        return [{"family": s.family, "chosen": s.chosen, "refused": s.refused} for s in self.selection]

    @property
    def workspaces(self) -> list[Workspace]:
        """Those that want memory to compute in."""
        return [family for family in astuple(self) if isinstance(family, Workspace)]
