"""What a model declares of its weights before any of them has storage.

A parameter says which checkpoint tensors fill which of its rows; loading does
the rest. Layers declare theirs on a Blueprint while the model is built, so the
list of all parameters is complete when the last layer exists.
"""

from __future__ import annotations

from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from infd.kernels.families.matrices import Form, Matrices
    from infd.kernels.ops import Ops
    from infd.models.layers.rope import Rope


class Source(Struct, frozen=True):
    """One checkpoint tensor: its name, its shape, and the first row of the parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    row: int = 0


class Parameter:
    """One tensor of the model, as checkpoints have it: row after row.

    `tensor` is set when the weights are loaded; reading it earlier is an AttributeError.
    """

    __slots__ = ("dtype", "shape", "sources", "tensor")

    tensor: torch.Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sources: tuple[Source, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.sources = sources

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        """Return the part of `tensor` that lies as rows of the checkpoint do, or None: then they are to be placed."""
        return self.tensor.narrow(0, first, count) if self.shape else self.tensor

    def place(self, first: int, rows: torch.Tensor) -> None:
        """Make these the rows from `first` on."""
        self.tensor.narrow(0, first, rows.shape[0]).copy_(rows)


class Matrix(Parameter):
    """A matrix [out, in] in the form that its kernels want."""

    __slots__ = ("form",)

    def __init__(self, form: Form, sources: tuple[Source, ...]) -> None:
        super().__init__(form.shape, form.dtype, sources)
        self.form = form

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        return self.form.rows(self.tensor, first, count)

    def place(self, first: int, rows: torch.Tensor) -> None:
        self.form.place(self.tensor, first, rows)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False) -> torch.Tensor:
        """Return x [T, in] times the matrix, transposed, plus bias [out], in x's dtype or, if `wide`, in float32."""
        return self.form.multiply(x, self.tensor, bias, wide=wide)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, in] for tokens [T]."""
        return self.form.look_up(tokens, self.tensor)


class Target(Struct, frozen=True, eq=False):
    """A product, or a table, that adapters may add to.

    modules  the checkpoint modules stacked in it, each named with its outputs, in order
    inputs   what each of them reads: numbers of a row, or rows of a table
    table    whether it is looked up rather than multiplied
    """

    modules: Mapping[str, int]
    inputs: int
    table: bool = False


class Stored(Protocol):
    """A tensor of the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Blueprint(Struct, frozen=True, kw_only=True):
    """What layers need while they are built.

    max_len     the longest sequence, for tables by position
    stored      the checkpoint's tensors by name, which tell how it was saved
    parameters  those declared so far, in order of use
    targets     what adapters may add to, likewise
    ropes       the rotary positions of its layers, likewise
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    max_len: int
    stored: Mapping[str, Stored] = MappingProxyType({})
    parameters: list[Parameter] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    ropes: list[Rope] = field(default_factory=list)

    def least_rows(self) -> int:
        """Return how many rows every product needs, so that none depends on their number to its last bit."""
        return max(matrix.form.least_rows for matrix in self.parameters if isinstance(matrix, Matrix))

    def declare(self, rows: Mapping[str, int], columns: tuple[int, ...] = ()) -> Parameter:
        """Declare a parameter [sum of rows, *columns] that stacks checkpoint tensors, named with their rows."""
        parameter = Parameter((sum(rows.values()), *columns), self.dtype, _stack(rows, columns))
        self.parameters.append(parameter)
        return parameter

    def matrix(self, rows: Mapping[str, int], inputs: int, family: Matrices) -> Matrix:
        """Declare a matrix [sum of rows, inputs] that stacks checkpoint tensors, in a form of `family`."""
        matrix = Matrix(family.form(sum(rows.values()), inputs, self.dtype), _stack(rows, (inputs,)))
        self.parameters.append(matrix)
        return matrix

    def adaptable(self, modules: Mapping[str, int], inputs: int, *, table: bool = False) -> Target:
        """Declare that adapters may add to what these modules give; see Target."""
        target = Target(modules, inputs, table)
        self.targets.append(target)
        return target


def _stack(rows: Mapping[str, int], columns: tuple[int, ...]) -> tuple[Source, ...]:
    firsts = accumulate(rows.values(), initial=0)
    return tuple(
        Source(name, (count, *columns), first) for (name, count), first in zip(rows.items(), firsts, strict=False)
    )
