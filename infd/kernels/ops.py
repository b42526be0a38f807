"""The implementations of kernel families that a process uses. Importing this module does not import torch."""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from infd.kernels.families.activation import Activation
    from infd.kernels.families.adapters import Lora
    from infd.kernels.families.attention import Attention
    from infd.kernels.families.draw import Draw
    from infd.kernels.families.encoder import EncoderStack
    from infd.kernels.families.experts import Experts
    from infd.kernels.families.inputs import Inputs
    from infd.kernels.families.matrices import Matrices, Packed
    from infd.kernels.families.norm import Norm
    from infd.kernels.families.pooling import Pooling
    from infd.kernels.families.rope import Rope
    from infd.kernels.families.rows import RowKernels
    from infd.kernels.families.span_attention import SpanAttention
    from infd.kernels.families.stack import Stack


class Selected(Struct, frozen=True):
    """One row of the selection table.

    chosen   name of the implementation that the family uses
    refused  by name, why preferred implementations are not used, and the cases that the chosen implementation delegates
    """

    family: str
    chosen: str
    refused: dict[str, str]


@runtime_checkable
class Workspace(Protocol):
    """An implementation whose kernels need memory at a fixed address, in addition to each step's allocations.

    The memory is zeroed before the first step, and again when a wake reallocates the memory, so kernels must not keep
    data there from one step to the next.
    """

    @property
    def workspace_bytes(self) -> int: ...

    def work_in(self, memory: Tensor) -> None:
        """Use `memory`, [workspace_bytes] uint8, on the device. Called once, before any computation."""


class Choice(NamedTuple):
    """A family's implementation, and its row of the selection table."""

    implementation: Any
    selected: Selected


class Ops:
    """The implementation of each kernel family, chosen when a model or a runner first requests the family.

    An implementation's module is imported when the implementation is chosen.
    """

    def __init__(self, choose: Callable[[str], Choice], fixed: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Set up, without choosing an implementation.

        choose  called once with each requested family; raises DeviceMissing
        fixed   implementations by family, for which `choose` is not called
        """
        self._choose = choose
        self._fixed = fixed
        self._choices: dict[str, Choice] = {}

    @cached_property
    def attention(self) -> Attention:
        return self._ask("attention")

    @cached_property
    def span_attention(self) -> SpanAttention:
        return self._ask("span_attention")

    @cached_property
    def linear(self) -> Matrices:
        return self._ask("linear")

    @cached_property
    def encoder_linear(self) -> Matrices:
        return self._ask("encoder_linear")

    @cached_property
    def vocabulary(self) -> Matrices:
        return self._ask("vocabulary")

    @cached_property
    def table(self) -> Matrices:
        return self._ask("table")

    @cached_property
    def packed(self) -> Packed:
        return self._ask("packed")

    @cached_property
    def inputs(self) -> Inputs:
        return self._ask("inputs")

    @cached_property
    def norm(self) -> Norm:
        return self._ask("norm")

    @cached_property
    def rope(self) -> Rope:
        return self._ask("rope")

    @cached_property
    def activation(self) -> Activation:
        return self._ask("activation")

    @cached_property
    def experts(self) -> Experts:
        return self._ask("experts")

    @cached_property
    def stack(self) -> Stack:
        return self._ask("stack")

    @cached_property
    def encoder(self) -> EncoderStack:
        return self._ask("encoder")

    @cached_property
    def pooling(self) -> Pooling:
        return self._ask("pooling")

    @cached_property
    def rows(self) -> RowKernels:
        return self._ask("rows")

    @cached_property
    def draw(self) -> Draw:
        return self._ask("draw")

    @cached_property
    def lora(self) -> Lora:
        return self._ask("lora")

    def request(self, *families: str) -> None:
        """Choose the implementations of `families` now. Raises DeviceMissing."""
        for family in families:
            getattr(self, family)

    def replace(self, **implementations: Any) -> Ops:
        """Return ops with the given implementations, by family; others keep the implementations chosen so far."""
        other = Ops(self._choose, {**self._fixed, **implementations})
        other._choices = {family: choice for family, choice in self._choices.items() if family not in implementations}
        return other

    @property
    def selection(self) -> list[Selected]:
        """The choices so far, sorted by family."""
        return [self._choices[family].selected for family in sorted(self._choices)]

    def describe(self) -> list[dict[str, Any]]:
        """Return the selection table as plain values, for `infdctl ops`."""
        return [{"family": s.family, "chosen": s.chosen, "refused": s.refused} for s in self.selection]

    @property
    def workspaces(self) -> list[Workspace]:
        """The implementations in use that need a workspace."""
        used = [*self._fixed.values(), *(choice.implementation for choice in self._choices.values())]
        return [implementation for implementation in used if isinstance(implementation, Workspace)]

    def _ask(self, family: str) -> Any:
        if family in self._fixed:
            return self._fixed[family]
        if family not in self._choices:
            self._choices[family] = self._choose(family)
        return self._choices[family].implementation
