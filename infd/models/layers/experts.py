"""The feed-forward network of a mixture of experts: a router, the experts that it chooses, optional shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec import Struct

from infd.kernels.families.experts import ExpertChanges
from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, SharedRecipe, StackRecipe
from infd.kernels.router import Gating
from infd.models.parameter import Source, View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.router import Router
    from infd.models.base import Batch
    from infd.models.blueprint import Blueprint
    from infd.models.layers.linear import Linear
    from infd.models.layers.mlp import GatedMLP
    from infd.models.parameter import MatrixStack, Parameter, Target


class DiskLayout(NamedTuple):
    """How a checkpoint stores the experts' matrices.

    gate_up      names of gate and up, or of one tensor of both; with {} in place of an expert's index, each expert has
                 its own tensor, else a tensor stacks all experts
    down         name of the down projection, likewise
    turned       whether stacked matrices are transposed; encoded matrices never are
    alternating  whether the rows of gate and up alternate
    biases       names of the stacked biases, as of the matrices
    """

    gate_up: tuple[str, ...]
    down: str
    turned: bool = False
    alternating: bool = False
    biases: tuple[tuple[str, ...], str] = (("experts.gate_up_proj_bias",), "experts.down_proj_bias")


# Also of every family after its stacked experts were quantized, see quantize/stacks.py
ONE_BY_ONE = DiskLayout(
    ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
    "experts.{}.down_proj.weight",
    biases=(("experts.{}.gate_proj.bias", "experts.{}.up_proj.bias"), "experts.{}.down_proj.bias"),
)
STACKED = DiskLayout(("experts.gate_up_proj",), "experts.down_proj")
# Of every family in GGUF, under the names that infd/gguf gives
APART = DiskLayout(
    ("experts.gate_proj.weight", "experts.up_proj.weight"),
    "experts.down_proj.weight",
    biases=(("experts.gate_proj.bias", "experts.up_proj.bias"), "experts.down_proj.bias"),
)


class ExpertsDesign(NamedTuple):
    """The properties of the experts that all layers share.

    router      see families.experts.Router
    inner       an expert's hidden size
    layouts     the layouts that checkpoints of the family have beside ONE_BY_ONE and APART, the usual one first
    gate        name of the router's module
    correction  name of the router's correction bias, [E] or [1, E]; "": none
    gate_bias   whether the router has a bias
    bias        whether the experts have biases
    """

    router: Router
    inner: int
    layouts: Sequence[DiskLayout] = (ONE_BY_ONE, STACKED)
    gating: Gating = Gating()
    gate: str = "gate"
    correction: str = ""
    gate_bias: bool = False
    bias: bool = False


class Shared(NamedTuple):
    """Experts that all tokens share, as one network. gate: its sigmoid, one number a token, multiplies the output."""

    mlp: GatedMLP
    gate: Linear | None = None


class Experts:
    """The experts of one layer."""

    def __init__(
        self, blueprint: Blueprint, name: str, hidden: int, design: ExpertsDesign, shared: Shared | None = None
    ) -> None:
        """Declare the router and the experts' matrices. name: prefix of the checkpoint's names."""
        router = design.router
        self._family, self._design, self._shared = blueprint.ops.experts, design, shared
        self._number = len(blueprint.mixtures)
        blueprint.mixtures.append((router.experts, router.chosen))
        gate = f"{name}.{design.gate}"
        self._gate = blueprint.declare({f"{gate}.weight": router.experts}, (hidden,), torch.float32)
        self._gate_bias = (
            blueprint.declare({f"{gate}.bias": router.experts}, dtype=torch.float32) if design.gate_bias else None
        )
        self._correction = (
            _correction(blueprint, f"{name}.{design.correction}", router.experts) if design.correction else None
        )
        layouts = (*design.layouts, ONE_BY_ONE, APART)
        layout = next((each for each in layouts if f"{name}.{each.down.format(0)}" in blueprint.stored), layouts[0])
        both, stored = 2 * design.inner, _Stored(blueprint, name, layout, router.experts)
        self._gate_up = blueprint.matrices(router.experts, both, hidden, stored.gate_up(design.inner, (hidden,)))
        self._down = blueprint.matrices(router.experts, hidden, design.inner, stored.down(hidden, (design.inner,)))
        self._targets = _adaptable(blueprint, name, hidden, design)
        self._gate_up_bias = self._down_bias = None
        if design.bias:
            gate_up, down = layout.biases
            unturned = layout._replace(gate_up=gate_up, down=down, turned=False)
            biases = _Stored(blueprint, name, unturned, router.experts)
            self._gate_up_bias = blueprint.fill(
                (router.experts * both,), blueprint.dtype, biases.gate_up(design.inner, ())
            )
            self._down_bias = blueprint.fill((router.experts * hidden,), blueprint.dtype, biases.down(hidden, ()))

    def recipe(self) -> ExpertsRecipe:
        experts = self._design.router.experts

        def stack(matrices: MatrixStack, bias: Tensor | None) -> StackRecipe:
            return StackRecipe(matrices.form, matrices.tensor, None if bias is None else bias.view(experts, -1))

        shared = self._shared
        return ExpertsRecipe(
            router=RouterRecipe(
                self._design.router,
                self._gate.tensor,
                None if self._gate_bias is None else self._gate_bias.tensor,
                None if self._correction is None else self._correction.tensor.view(-1),
            ),
            number=self._number,
            gate_up=stack(self._gate_up, None if self._gate_up_bias is None else self._gate_up_bias.tensor),
            gating=self._design.gating,
            down=stack(self._down, None if self._down_bias is None else self._down_bias.tensor),
            shared=None
            if shared is None
            else SharedRecipe(shared.mlp.recipe(), None if shared.gate is None else shared.gate.recipe()),
        )

    def _changes(self, batch: Batch) -> ExpertChanges | None:
        """Return the changes that the adapters of a pass make to the experts' matrices; None: there are none."""
        if batch.adapters is None:
            return None
        gate_up, down = (batch.adapters.groups(target) for target in self._targets)
        return ExpertChanges(gate_up, down) if gate_up or down else None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the output [T, hidden] of the layer's experts for x [T, hidden]."""
        recipe = self.recipe()
        routes = self._family.route(x, recipe.router)
        if batch.routes is not None:
            batch.routes[: len(x), self._number] = routes.experts
        y = self._family.compute(x, routes, recipe, self._changes(batch))
        if self._shared is None:
            return y
        gate = None if self._shared.gate is None else self._shared.gate(x, batch.adapters)
        return self._family.add_shared(y, self._shared.mlp(x, batch), gate)


def _adaptable(blueprint: Blueprint, name: str, hidden: int, design: ExpertsDesign) -> tuple[Target, Target]:
    """Declare the experts' matrices that adapters may change: gate and up, and down.

    PEFT writes changes of each expert's modules, named as in checkpoints with a tensor for each expert, or of the
    parameters that stack the experts in transformers, which from version 5 on are beneath `mlp` in Mixtral too. The
    order of rows is that of transformers, in whatever layout the checkpoint stores them.
    """
    count, inner = design.router.experts, design.inner
    alternating = any(layout.alternating for layout in design.layouts)
    transposed = any(layout.turned for layout in design.layouts)
    numbered = next((layout for layout in design.layouts if "{}" in layout.down), ONE_BY_ONE)
    *gates, down = (f"{name}.{part.removesuffix('.weight')}" for part in (*numbered.gate_up, numbered.down))
    places = (name, name.replace("block_sparse_moe", "mlp"))

    def stacked(parameter: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f"{place}.experts.{parameter}" for place in places))

    return (
        blueprint.adaptable_experts(
            count,
            dict.fromkeys(gates, inner),
            hidden,
            stacked("gate_up_proj"),
            alternating=alternating,
            transposed=transposed,
        ),
        blueprint.adaptable_experts(
            count, {down: hidden}, inner, stacked("down_proj"), alternating=False, transposed=transposed
        ),
    )


class _Stored(Struct, frozen=True):
    """The stored tensors of one layer's experts."""

    blueprint: Blueprint
    name: str
    layout: DiskLayout
    experts: int

    def gate_up(self, inner: int, rest: tuple[int, ...]) -> tuple[Source, ...]:
        """Return the sources of each expert's gate, `inner` rows of shape `rest`, and up."""
        if len(self.layout.gate_up) == 2:
            return tuple(
                self._source(name, expert, expert * 2 * inner + part * inner, inner, rest)
                for expert in range(self.experts)
                for part, name in enumerate(self.layout.gate_up)
            )
        (name,) = self.layout.gate_up
        if not self.layout.alternating:
            return tuple(self._source(name, e, e * 2 * inner, 2 * inner, rest) for e in range(self.experts))
        return tuple(
            self._part(name, View(expert, inner, first, 2), expert * 2 * inner + first * inner, 2 * inner, rest)
            for expert in range(self.experts)
            for first in (0, 1)
        )

    def down(self, outputs: int, rest: tuple[int, ...]) -> tuple[Source, ...]:
        """Return the sources of each expert's down projection, `outputs` rows of shape `rest`."""
        return tuple(self._source(self.layout.down, e, e * outputs, outputs, rest) for e in range(self.experts))

    def _source(self, name: str, expert: int, row: int, count: int, rest: tuple[int, ...]) -> Source:
        if "{}" in name:
            return Source(f"{self.name}.{name.format(expert)}", (count, *rest), row)
        return self._part(name, View(expert, count), row, count, rest)

    def _part(self, name: str, view: View, row: int, height: int, rest: tuple[int, ...]) -> Source:
        """Return the source of a view of a stack of matrices or vectors with `height` rows."""
        whole = f"{self.name}.{name}"
        stored = self.blueprint.stored.get(whole)
        turned = self.layout.turned and (stored is None or stored.packed() is None)
        shape = (self.experts, *rest, height) if turned else (self.experts, height, *rest)
        view = View(view.index, view.count, view.first, view.step, turned)
        return Source(whole, shape, row, view)


def _correction(blueprint: Blueprint, name: str, experts: int) -> Parameter:
    """Declare a router's correction bias, which checkpoints store as [E] or [1, E]."""
    stored = blueprint.stored.get(name)
    shape = (1, experts) if stored is not None and tuple(stored.shape) == (1, experts) else (experts,)
    return blueprint.fill(shape, torch.float32, (Source(name, shape),))
