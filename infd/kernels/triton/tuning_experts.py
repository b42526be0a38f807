"""The tilings of experts that are tried, and the steps that are timed: tokens that choose experts at random."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from msgspec.structs import replace

from infd.kernels.families.experts import Routes
from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe
from infd.kernels.reference.dense import Plain
from infd.kernels.router import Gating, Router
from infd.kernels.triton.blocks import LEAST
from infd.kernels.triton.expert_tiles import ExpertsTiling, Tile, fitting
from infd.kernels.triton.experts import Experts
from infd.kernels.triton.packed import PackedMatrix
from infd.kernels.triton.tuning import Fixed, Measured, Variations, search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from infd.groups import Groups
    from infd.kernels.triton.blocks import Gpu
    from infd.kernels.triton.expert_tiles import ExpertsShape
    from infd.kernels.triton.tuning import Cost, Found

TOKENS: Final = (1, 8, 32, 128, 1024, 4096)  # of the timed steps


def tune(
    shape: ExpertsShape, gpu: Gpu, device: torch.device, timer: Callable[[Callable[[], object]], float]
) -> Found[ExpertsTiling]:
    """Return the fastest tiling of experts of one shape."""
    return find(shape, gpu, measured(shape, gpu, device, timer))


def find(shape: ExpertsShape, gpu: Gpu, cost: Cost[ExpertsTiling]) -> Found[ExpertsTiling]:
    """Return the fastest tiling by `cost`."""

    def few(tiling: ExpertsTiling) -> Iterator[ExpertsTiling]:
        for tile in _fitting((LEAST, 2 * LEAST), (32, 64, 128), (4, 8), (1, 2, 3, 4, 5), shape, gpu):
            yield replace(tiling, few=tile)

    def many(tiling: ExpertsTiling) -> Iterator[ExpertsTiling]:
        for tile in _fitting((32, 64, 128), (32, 64, 128, 256), (4, 8), (1, 2, 3, 4), shape, gpu):
            yield replace(tiling, many=tile)

    return search(shape.default_tiling(gpu), Variations([few], [many]), cost)


def _fitting(
    rows: Sequence[int],
    outputs: Sequence[int],
    warps: Sequence[int],
    stages: Sequence[int],
    shape: ExpertsShape,
    gpu: Gpu,
) -> Iterator[Tile]:
    for tile in (Tile(r, o, w, s) for r in rows for o in outputs for w in warps for s in stages):
        if fitting(tile, shape, gpu) == tile:
            yield tile


def measured(
    shape: ExpertsShape,
    gpu: Gpu,
    device: torch.device,
    timer: Callable[[Callable[[], object]], float],
    tokens: Sequence[int] = TOKENS,
) -> Measured[ExpertsTiling]:
    """Return the cost of tilings.

    timer   measures the seconds that a call takes
    tokens  of each step; if all of them use the tile of few routes, one more step is timed that does not
    """
    layer = random_layer(shape, device)
    few = [count for count in tokens if shape.is_few(count)]
    many = [count for count in tokens if not shape.is_few(count)] or [shape.most_few + 1]

    def step(count: int) -> Callable[[ExpertsTiling], Callable[[], Tensor]]:
        x = torch.randn(count, shape.hidden, device=device).to(shape.dtype)
        routes = Routes(
            torch.rand(count, shape.experts, device=device).topk(shape.chosen).indices,
            torch.rand(count, shape.chosen, device=device),
        )

        def work(tiling: ExpertsTiling) -> Callable[[], Tensor]:
            return partial(Experts(Fixed(gpu, tiling)).compute, x, routes, layer)

        return work

    return Measured(
        timer,
        1e-4 if shape.dtype is torch.float32 else 2e-2,
        shape.default_tiling(gpu),
        [step(count) for count in few],
        [step(count) for count in many],
    )


def random_layer(shape: ExpertsShape, device: torch.device) -> ExpertsRecipe:
    """Return experts with random weights."""

    def stack(outputs: int, inputs: int, groups: Groups | None) -> StackRecipe:
        if groups is None:
            weights = torch.empty(shape.experts, outputs, inputs, dtype=shape.dtype, device=device)
            return StackRecipe(Plain((outputs, inputs), shape.dtype), weights.normal_(std=inputs**-0.5), None)
        form = PackedMatrix(outputs, inputs, groups, shape.dtype)
        storage = torch.empty(shape.experts, *form.shape, dtype=form.dtype, device=device)
        for expert in storage:
            _fill(form, expert)
        return StackRecipe(form, storage, None)

    design = Router(experts=shape.experts, chosen=shape.chosen)
    return ExpertsRecipe(
        router=RouterRecipe(design, torch.empty(0), None, None),
        gate_up=stack(2 * shape.inner, shape.hidden, shape.gate_up),
        gating=Gating(),
        down=stack(shape.hidden, shape.inner, shape.down),
    )


def _fill(form: PackedMatrix, storage: Tensor) -> None:
    """Fill a packed matrix with random integers; scales are such that outputs are near 1."""
    storage.random_().bitwise_and_(0x77)  # no NaN among fp8's numbers
    largest = {"": 8 if form.groups.bits == 4 else 128, "e4m3": 240, "e2m1": 12, "iq4_nl": 127}[form.groups.table]
    for name, number in (
        ("scales", form.inputs**-0.5 / largest),
        ("minima", 0.0),
        ("shared", form.inputs**-0.5 / largest),
    ):
        section = form.section(name, storage)
        if section is not None:
            section.fill_(number if section.is_floating_point() else 1)
    if (zeros := form.section("zeros", storage)) is not None:
        zeros.zero_()
    if (order := form.section("order", storage)) is not None:
        torch.arange(form.inputs, out=order)
