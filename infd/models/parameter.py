"""The weights that a model declares before any of them has storage.

A parameter names the checkpoint tensors that fill its rows; `weights/` loads them. Layers declare their parameters on
a Blueprint while the model is built, so the list is complete once the last layer exists.
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
    """One checkpoint tensor: its name, its shape, and the parameter's row where it begins."""

    name: str
    shape: tuple[int, ...]
    row: int = 0


class Parameter:
    """One tensor of the model, in the checkpoint's row order.

    `tensor` is set when the weights are loaded; reading it earlier raises AttributeError.
    """

    __slots__ = ("dtype", "shape", "sources", "tensor")

    tensor: torch.Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sources: tuple[Source, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.sources = sources

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        """Return a view of `tensor` that takes checkpoint rows unchanged, or None if they must go through `place`."""
        return self.tensor.narrow(0, first, count) if self.shape else self.tensor

    def place(self, first: int, rows: torch.Tensor) -> None:
        """Write the checkpoint rows [n, ...] to the parameter's rows from `first` on."""
        self.tensor.narrow(0, first, rows.shape[0]).copy_(rows)


class Matrix(Parameter):
    """A weight matrix [out, in], stored in its form."""

    __slots__ = ("form",)

    def __init__(self, form: Form, sources: tuple[Source, ...]) -> None:
        super().__init__(form.shape, form.dtype, sources)
        self.form = form

    def rows(self, first: int, count: int) -> torch.Tensor | None:
        return self.form.rows(self.tensor, first, count)

    def place(self, first: int, rows: torch.Tensor) -> None:
        self.form.place(self.tensor, first, rows)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False) -> torch.Tensor:
        """Return x [T, in] times the matrix transposed, plus bias [out]: in x's dtype, or float32 if `wide`."""
        return self.form.multiply(x, self.tensor, bias, wide=wide)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows [T, in] of tokens [T]."""
        return self.form.look_up(tokens, self.tensor)


class Target(Struct, frozen=True, eq=False):
    """A product, or a table, that adapters may change.

    modules  the stacked checkpoint modules, in order: name to outputs
    inputs   columns of the product's weight, or rows of the table
    table    looked up by token rather than multiplied
    """

    modules: Mapping[str, int]
    inputs: int
    table: bool = False


class Stored(Protocol):
    """The shape of a checkpoint tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Blueprint(Struct, frozen=True, kw_only=True):
    """The inputs of every layer's constructor, and the lists to which layers add their declarations.

    max_len     the longest sequence in tokens, for tables by position
    stored      the checkpoint's tensors by name; empty: the usual names are assumed
    parameters  declared so far, in order of use
    targets     declared so far, in order of use
    ropes       built so far, in order of use
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
        """Return the smallest number of rows at which no product depends on that number to the last bit."""
        return max(matrix.form.least_rows for matrix in self.parameters if isinstance(matrix, Matrix))

    def declare(self, rows: Mapping[str, int], columns: tuple[int, ...] = ()) -> Parameter:
        """Declare a parameter [sum of rows, *columns] that stacks checkpoint tensors; `rows` maps name to rows."""
        parameter = Parameter((sum(rows.values()), *columns), self.dtype, _stack(rows, columns))
        self.parameters.append(parameter)
        return parameter

    def matrix(self, rows: Mapping[str, int], inputs: int, family: Matrices) -> Matrix:
        """Declare a matrix [sum of rows, inputs] in a form of `family`, stacking checkpoint tensors."""
        matrix = Matrix(family.form(sum(rows.values()), inputs, self.dtype), _stack(rows, (inputs,)))
        self.parameters.append(matrix)
        return matrix

    def adaptable(self, modules: Mapping[str, int], inputs: int, *, table: bool = False) -> Target:
        """Declare a Target that adapters may change."""
        target = Target(modules, inputs, table)
        self.targets.append(target)
        return target


def _stack(rows: Mapping[str, int], columns: tuple[int, ...]) -> tuple[Source, ...]:
    firsts = accumulate(rows.values(), initial=0)
    return tuple(
        Source(name, (count, *columns), first) for (name, count), first in zip(rows.items(), firsts, strict=False)
    )
