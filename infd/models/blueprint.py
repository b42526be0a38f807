"""The declarations of a model under construction: parameters, adapter targets, ropes.

Layers add declarations to a Blueprint while the model is built, so the lists are complete once the last layer exists.
Layers also request kernel families, through `Blueprint.ops`; other families are never loaded.
"""

from __future__ import annotations

from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from infd.groups import Groups, common
from infd.kernels.families.inputs import QuantizesStored, RoundsInputs
from infd.models.layers.rope import Rope
from infd.models.parameter import Matrix, MatrixStack, Parameter, RoundedInputs, Source, Target
from infd.pooling import PoolingSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from infd.input_scheme import InputScheme
    from infd.kernels.families.matrices import Form, Matrices
    from infd.kernels.ops import Ops
    from infd.models.config import Settings


class StoredInputs(Protocol):
    @property
    def scheme(self) -> InputScheme: ...


class Stored(Protocol):
    """A checkpoint tensor. inputs: how the inputs of products with it are quantized; None: they are not."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def inputs(self) -> StoredInputs | None: ...
    def packed(self) -> Groups | str | None:
        """Return how a tensor's integers are stored, or why no form can keep them; None: the tensor is not encoded."""


class Blueprint(Struct, frozen=True, kw_only=True):
    """The inputs of every layer's constructor, and the lists to which layers add their declarations.

    max_len     tokens of the longest sequence, for tables of rotary angles
    stored      the checkpoint's tensors by name; empty: the usual names are assumed
    pooling     how hidden states are pooled
    parameters  declared so far, in order
    targets     declared so far, in order
    ropes       declared so far, in order
    mixtures    of the layers with experts declared so far, in order: experts, and how many a token chooses
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    max_len: int
    stored: Mapping[str, Stored] = MappingProxyType({})
    pooling: PoolingSettings = field(default_factory=PoolingSettings)
    parameters: list[Parameter] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    ropes: list[Rope] = field(default_factory=list)
    mixtures: list[tuple[int, int]] = field(default_factory=list)

    def least_rows(self) -> int:
        """Return the number of rows from which on a product's rows are bitwise independent of the number of rows."""
        return max(matrix.form.least_rows for matrix in self.parameters if isinstance(matrix, Matrix))

    def declare(
        self, rows: Mapping[str, int], columns: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Parameter:
        """Declare a parameter [sum of rows, *columns] that stacks checkpoint tensors. rows: number of rows by name.

        dtype  None: the activations' dtype
        """
        return self.fill((sum(rows.values()), *columns), dtype or self.dtype, _stack(rows, columns))

    def fill(self, shape: tuple[int, ...], dtype: torch.dtype, sources: tuple[Source, ...]) -> Parameter:
        """Declare a parameter with the given sources."""
        parameter = Parameter(shape, dtype, sources)
        self.parameters.append(parameter)
        return parameter

    def matrix(self, rows: Mapping[str, int], inputs: int, family: Matrices) -> Matrix:
        """Declare a matrix [sum of rows, inputs] that stacks checkpoint tensors.

        If all tensors are stored as numbers and scales, the matrix has a form that represents all exactly, unless there
        is none, or `family` quantizes to other numbers. Otherwise the matrix has a form of `family`.

        If the checkpoint's scheme quantizes inputs, products do too, unless `family` quantizes weights: then `family`
        determines whether inputs are quantized.
        """
        outputs, sources = sum(rows.values()), _stack(rows, (inputs,))
        if family.numbers is None:
            scheme = self._input_scheme(rows)
        else:
            scheme = family.rounds if isinstance(family, RoundsInputs) else None
        rounded = None
        if scheme is not None and not self.ops.inputs.why_not(scheme):
            rounded = RoundedInputs(self.ops.inputs, scheme, self.device, stored=family.numbers is None)
        keeping = self._keeping(rows, outputs, inputs, family.numbers, scheme, rounded)
        refused = keeping if isinstance(keeping, str) else ""
        kept = None if isinstance(keeping, str) else keeping
        form = kept or family.form(outputs, inputs, self.dtype)
        if rounded is not None and form.quantizes is None and isinstance(form, QuantizesStored):
            found = form.stored(rounded.recipe())
            form = form if isinstance(found, str) else found
        own = form.quantizes
        if rounded is not None and not (rounded.scheme.before(own) or (rounded.scheme == own and own.static)):
            rounded = None
        matrix = Matrix(form, sources, kept=kept is not None, refused=refused, inputs=rounded)
        self.parameters.append(matrix)
        return matrix

    def matrices(self, count: int, outputs: int, inputs: int, sources: tuple[Source, ...]) -> MatrixStack:
        """Declare a matrix [outputs, inputs] for each of `count` experts; forms are chosen as for `matrix`.

        Their inputs are not rounded by the checkpoint's scheme.

        sources  each fills rows of one matrix; rows are counted through all matrices
        """
        family, names = self.ops.linear, {source.name for source in sources}
        form = self._keeping(names, outputs, inputs, family.numbers)
        if form is None or isinstance(form, str):
            stack = MatrixStack(family.form(outputs, inputs, self.dtype), count, outputs, sources, refused=form or "")
        else:
            stack = MatrixStack(form, count, outputs, sources, kept=True)
        self.parameters.append(stack)
        return stack

    def _input_scheme(self, names: Collection[str]) -> InputScheme | None:
        """Return how the inputs of all tensors are quantized; None if they are not, or differ."""
        found = [self.stored[name].inputs for name in names if name in self.stored]
        schemes = {None if inputs is None else inputs.scheme for inputs in found}
        return schemes.pop() if len(schemes) == 1 else None

    def _keeping(
        self,
        names: Collection[str],
        outputs: int,
        inputs: int,
        numbers: tuple[int, str] | None,
        scheme: InputScheme | None = None,
        rounded: RoundedInputs | None = None,
    ) -> Form | str | None:
        """Return a form that keeps the encoding in which the checkpoint stores the tensors `names`.

        numbers  to which the layer's own family quantizes: bits and table; None: the family does not quantize
        scheme   how inputs are quantized; None: the form decides
        rounded  the stored scales of `scheme`; None: inputs are not rounded by the scheme

        Returns the reason in words if no form can keep the encoding, and None if no tensor is encoded.
        """
        kinds = {self.stored[name].packed() for name in names if name in self.stored}
        if kinds <= {None}:
            return None
        groups = [kind for kind in kinds if isinstance(kind, Groups)]
        reasons = [kind for kind in kinds if isinstance(kind, str)]
        if len(kinds) == 1 and reasons:
            return reasons[0]
        packed = common(groups) if len(groups) == len(kinds) else None
        if packed is None:
            return "the matrices with the same input are stored differently"
        if numbers not in (None, (packed.bits, packed.table)):
            assert numbers is not None
            bits, table = numbers
            if table != packed.table:
                return "its numbers are no integers" if packed.table and not table else f"its numbers are not {table}"
            return f"{packed.bits} bits, the form has {bits}"
        form = self.ops.packed.form(outputs, inputs, self.dtype, packed)
        if scheme is not None and not isinstance(form, str) and not scheme.replaceable(form.quantizes):
            if rounded is not None and isinstance(form, QuantizesStored):
                return form.stored(rounded.recipe())
            return f"products with its form would quantize inputs as {form.quantizes}, not as {scheme}"
        return form

    def adaptable(self, modules: Mapping[str, int], inputs: int, *, table: bool = False) -> Target:
        """Declare a weight matrix or an embedding table that adapters may change; see Target for the arguments."""
        target = Target(modules, inputs, table)
        self.targets.append(target)
        return target

    def replaceable(self, module: str, outputs: int, inputs: int, *, bias: bool) -> Target:
        """Declare a layer for which adapters may have a weight and a bias of their own; see Target."""
        target = Target({module: outputs}, inputs, whole=True, bias=bias)
        self.targets.append(target)
        return target

    def adaptable_experts(
        self,
        experts: int,
        modules: Mapping[str, int],
        inputs: int,
        stacked: tuple[str, ...],
        *,
        alternating: bool,
        transposed: bool,
    ) -> Target:
        """Declare a matrix of each expert, which adapters may change; see Target for the arguments."""
        target = Target(
            modules, inputs, experts=experts, stacked=stacked, alternating=alternating, transposed=transposed
        )
        self.targets.append(target)
        return target

    def rope(self, settings: Settings, head_size: int, *, partial: bool = False) -> Rope:
        """Build the rotary position embedding of some layers; see Rope for arguments and errors."""
        number, length = len(self.ropes), self.max_len
        rope = Rope(settings, head_size, max_len=length, device=self.device, number=number, partial=partial)
        self.ropes.append(rope)
        return rope


def _stack(rows: Mapping[str, int], columns: tuple[int, ...]) -> tuple[Source, ...]:
    firsts = accumulate(rows.values(), initial=0)
    return tuple(
        Source(name, (count, *columns), first) for (name, count), first in zip(rows.items(), firsts, strict=False)
    )
