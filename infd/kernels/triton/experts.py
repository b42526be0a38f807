"""Mixtures of experts on a GPU: routes sorted by expert, two grouped products, and a weighted sum for each token.

No step waits for the device, and launch shapes depend on the number of tokens alone, so steps can be captured. A
token's output is a sum in the order of its routes, without atomics. The number of tokens selects one of two tiles; both
sum inputs in the same order. Routers are computed in plain torch, which does not wait either.

The low-rank products of adapters are grouped products, too, and follow those of the experts, so gate and up are stored
before the activation. The host launches them for each adapter of a step in turn, so such steps are not captured.

Never run on a GPU; the interpreter and the compiler are tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from infd.kernels.reference import experts as reference
from infd.kernels.reference.dense import Plain
from infd.kernels.triton.activation import activate
from infd.kernels.triton.expert_tiles import ExpertsShape
from infd.kernels.triton.grouped import FACTORS, Matrices, multiply, multiply_by_factors
from infd.kernels.triton.packed import PackedMatrix
from infd.kernels.triton.route_blocks import block_routes
from infd.kernels.triton.tilings import EXPERTS, tilings

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.adapters import Groups
    from infd.kernels.families.experts import ExpertChanges, Routes
    from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe
    from infd.kernels.triton.expert_tiles import ExpertsTiling, Tile
    from infd.kernels.triton.tilings import Tilings

BLOCK = 512


@triton.jit
def sum_routes(outputs, weights, y, size, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of one token's outputs [CHOSEN, size], times their weights if WEIGHTED, in y."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(CHOSEN):
        route = token * CHOSEN + slot
        value = tl.load(outputs + route * size + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + route)
        total += value
    tl.store(y + token * size + column, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_gated(y, shared, gate, size, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Add one row of `shared`, times the sigmoid of its gate if GATED, to y."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = row * size + column
    value = tl.load(shared + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        value *= 1.0 / (1.0 + tl.exp(-tl.load(gate + row).to(tl.float32)))
    total = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) + value
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


class Experts:
    """Implements families.experts.Experts.

    refused  see select.Candidate: layers whose forms no kernel reads
    """

    def __init__(self, tilings: Tilings[ExpertsShape, ExpertsTiling] | None = None) -> None:
        """Set up. tilings: None: the tilings for the first step's device."""
        self._reference = reference.Experts()
        self._tilings = tilings
        self._compiled: set[tuple[ExpertsShape, bool]] = set()
        self.refused: dict[str, str] = {}

    @property
    def shapes(self) -> list[ExpertsShape]:
        """Return the shapes of all layers so far."""
        return [] if self._tilings is None else self._tilings.requested

    def route(self, x: Tensor, router: RouterRecipe) -> Routes:
        return self._reference.route(x, router)

    def compute(self, x: Tensor, routes: Routes, layer: ExpertsRecipe, changes: ExpertChanges | None = None) -> Tensor:
        gate_up, down = _matrices(layer.gate_up), _matrices(layer.down)
        if gate_up is None or down is None:
            self.refused["triton experts"] = "no kernel reads the form of these experts: the reference computes them"
            return self._reference.compute(x, routes, layer, changes)
        x, (tokens, chosen) = x.contiguous(), routes.experts.shape
        shape = ExpertsShape(
            layer.router.design.experts,
            chosen,
            x.shape[1],
            gate_up.outputs // 2,
            x.dtype,
            gate_up.groups,
            down.groups,
        )
        tiling, changed = self._tiling(shape, x.device), changes is not None and bool(changes.gate_up)
        tile = tiling.few if shape.is_few(tokens) else tiling.many
        if (shape, changed) not in self._compiled:
            # Compile the kernels of both tiles now, so that no later step waits for the compiler.
            self._compiled.add((shape, changed))
            for each in {tiling.few, tiling.many} - {tile}:
                _compute(x, routes, layer, gate_up, down, each, changes)
        return _compute(x, routes, layer, gate_up, down, tile, changes)

    def add_shared(self, y: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        y, shared = y.contiguous(), shared.contiguous()
        add_gated[y.shape[0], triton.cdiv(y.shape[1], BLOCK)](
            y,
            shared,
            y if gate is None else gate.contiguous(),
            y.shape[1],
            GATED=gate is not None,
            BLOCK=BLOCK,
        )
        return y

    def _tiling(self, shape: ExpertsShape, device: torch.device) -> ExpertsTiling:
        if self._tilings is None:
            self._tilings = tilings(EXPERTS, device)
        return self._tilings[shape]


def _matrices(stack: StackRecipe) -> Matrices | None:
    """Describe the matrices of a product; None: no kernel reads their form."""
    if isinstance(stack.form, PackedMatrix) and stack.form.quantizes is None:
        return Matrices(stack.storage, stack.form.outputs, stack.form, stack.bias)
    if isinstance(stack.form, Plain):
        return Matrices(stack.storage, stack.storage.shape[1], None, stack.bias)
    return None


def _compute(
    x: Tensor,
    routes: Routes,
    layer: ExpertsRecipe,
    gate_up: Matrices,
    down: Matrices,
    tile: Tile,
    changes: ExpertChanges | None,
) -> Tensor:
    """Compute a layer whose matrices are `gate_up` and `down` with one tile."""
    (tokens, chosen), experts, on_input = (
        routes.experts.shape,
        layer.router.design.experts,
        layer.router.design.on_input,
    )
    blocks, count = block_routes(routes.experts, experts, tile.rows), tokens * chosen
    rows, sharing = x, chosen  # `sharing` consecutive routes have the same row
    if on_input:
        rows, sharing = (x[:, None] * routes.weights[..., None]).to(x.dtype).flatten(0, 1), 1
    if changes is None or not changes.gate_up:
        hidden = multiply(rows, gate_up, blocks, count, tile, chosen=sharing, gating=layer.gating)
    else:
        both = multiply(rows, gate_up, blocks, count, tile, chosen=sharing, dtype=torch.float32)
        _change(both, rows, sharing, routes, experts, changes.gate_up)
        hidden = activate(both, layer.gating, x.dtype)
    outputs = multiply(hidden, down, blocks, count, tile)
    if changes is not None:
        _change(outputs, hidden, 1, routes, experts, changes.down)
    y = torch.empty_like(x)
    sum_routes[tokens, triton.cdiv(x.shape[1], BLOCK)](
        outputs,
        routes.weights.contiguous(),
        y,
        x.shape[1],
        CHOSEN=chosen,
        WEIGHTED=not on_input,
        BLOCK=BLOCK,
    )
    return y


def _change(y: Tensor, rows: Tensor, sharing: int, routes: Routes, experts: int, groups: Groups) -> None:
    """Add the low-rank products of adapters to y [routes, outputs], in place.

    rows     [routes / sharing, inputs]
    experts  number of experts
    groups   rows of tokens, and the adapter's factors
    """
    tokens, chosen = routes.experts.shape
    by_token = y.view(tokens, chosen, -1)
    for members, low in groups:
        of_members = routes.experts[members]
        count = of_members.numel()
        blocks = block_routes(of_members, experts, FACTORS.rows)
        some = rows.view(tokens, chosen // sharing, -1)[members].flatten(0, 1)
        shrunk = multiply_by_factors(some, low.a, blocks, count, sharing)
        for b, rank, output in low.parts:
            added = multiply_by_factors(shrunk[:, rank : rank + b.shape[2]], b, blocks, count)
            part = by_token[..., output : output + b.shape[1]]
            part.index_add_(0, members, added.view(-1, chosen, b.shape[1]).to(y.dtype))
