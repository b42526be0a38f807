"""Mixtures of experts in C++: `native/experts.cpp`.

Experts' matrices may have any form that is Addressable. If a form is not, plain torch computes the layer's experts.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

from infd.kernels.cpu.library import FLOAT, INT, POINTER, Library
from infd.kernels.cpu.lora import Group, structure
from infd.kernels.cpu.product import Addressable, Product
from infd.kernels.families.experts import Routes
from infd.kernels.reference import experts as reference

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.experts import ExpertChanges
    from infd.kernels.recipe import ExpertsRecipe, RouterRecipe, StackRecipe

SCORES: Final = ("softmax", "chosen", "sigmoid", "margin")  # in the order of Scores in native/experts.cpp


class Router(ctypes.Structure):
    """The C structure Router of `native/experts.h`."""

    _fields_ = (
        ("weight", POINTER),
        ("bias", POINTER),
        ("correction", POINTER),
        ("hidden", INT),
        ("experts", INT),
        ("chosen", INT),
        ("scores", INT),
        ("groups", INT),
        ("chosen_groups", INT),
        ("on_input", INT),
        ("least_sum", FLOAT),
        ("scale", FLOAT),
        ("margin", FLOAT),
    )


class ExpertProducts(ctypes.Structure):
    """The C structure ExpertProducts of `native/experts.h`."""

    _fields_ = (("first", Product), ("stride", INT), ("panel", INT))


class Layer(ctypes.Structure):
    """The C structure Experts of `native/experts.h`."""

    _fields_ = (
        ("number", INT),
        ("router", Router),
        ("gate_up", ExpertProducts),
        ("down", ExpertProducts),
        ("gelu", INT),
        ("alpha", FLOAT),
        ("limit", FLOAT),
        ("offset", FLOAT),
    )


class Changes(ctypes.Structure):
    """The C structure ExpertChanges of `native/experts.h`."""

    _fields_ = (
        ("gate_up", ctypes.POINTER(Group)),
        ("down", ctypes.POINTER(Group)),
        ("gate_up_count", INT),
        ("down_count", INT),
    )


class Experts:
    """Implements families.experts.Experts for bfloat16 and float32."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._route = library.kernel("route", INT, POINTER, POINTER, INT, POINTER, POINTER)
        self._compute = library.kernel("experts", INT, POINTER, POINTER, INT, POINTER, POINTER, POINTER, POINTER)
        self._add = library.kernel("add_shared", INT, POINTER, POINTER, POINTER, INT, INT)
        self._reference = reference.Experts()

    def route(self, x: Tensor, router: RouterRecipe) -> Routes:
        x = x.contiguous()
        shape = (x.shape[0], router.design.chosen)
        routes = Routes(torch.empty(shape, dtype=torch.int64), torch.empty(shape))
        described = router_of(router)
        self._route(
            x.dtype is torch.bfloat16,
            ctypes.addressof(described),
            x.data_ptr(),
            len(x),
            routes.experts.data_ptr(),
            routes.weights.data_ptr(),
        )
        return routes

    def compute(self, x: Tensor, routes: Routes, layer: ExpertsRecipe, changes: ExpertChanges | None = None) -> Tensor:
        described = layer_of(layer)
        if described is None:
            return self._reference.compute(x, routes, layer, changes)
        low = None if changes is None else _changes(changes)
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        experts, weights = routes.experts.contiguous(), routes.weights.contiguous()
        self._compute(
            x.dtype is torch.bfloat16,
            ctypes.addressof(described),
            x.data_ptr(),
            len(x),
            experts.data_ptr(),
            weights.data_ptr(),
            None if low is None else ctypes.addressof(low),
            out.data_ptr(),
        )
        return out

    def add_shared(self, y: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        y, shared = y.contiguous(), shared.contiguous()
        gate = None if gate is None else gate.contiguous()
        half = y.dtype is torch.bfloat16
        self._add(half, y.data_ptr(), shared.data_ptr(), None if gate is None else gate.data_ptr(), *y.shape)
        return y


MOST_GROUPS: Final = 2**10  # of a router, see drop_groups in native/experts.cpp


def router_of(recipe: RouterRecipe) -> Router:
    """Describe a router; the recipe's tensors must outlive the structure."""
    design = recipe.design
    assert design.groups <= MOST_GROUPS
    return Router(
        weight=recipe.weight.data_ptr(),
        bias=None if recipe.bias is None else recipe.bias.data_ptr(),
        correction=None if recipe.correction is None else recipe.correction.data_ptr(),
        hidden=recipe.weight.shape[1],
        experts=design.experts,
        chosen=design.chosen,
        scores=SCORES.index(design.scores),
        groups=design.groups,
        chosen_groups=design.chosen_groups,
        on_input=design.on_input,
        least_sum=-1 if design.least_sum is None else design.least_sum,
        scale=design.scale,
        margin=design.margin,
    )


def layer_of(recipe: ExpertsRecipe) -> Layer | None:
    """Describe a layer's experts; None if a form is not Addressable. The structure points to the recipe's tensors."""
    gate_up, down = _products(recipe.gate_up), _products(recipe.down)
    if gate_up is None or down is None:
        return None
    gating = recipe.gating
    return Layer(
        number=recipe.number,
        router=router_of(recipe.router),
        gate_up=gate_up,
        down=down,
        gelu=gating.activation == "gelu_pytorch_tanh",
        alpha=gating.alpha,
        limit=gating.limit,
        offset=gating.offset,
    )


def _changes(changes: ExpertChanges) -> Changes:
    gate_up, down = (
        (Group * len(groups))(*(structure(rows, low, low.a.shape[1]) for rows, low in groups)) for groups in changes
    )
    return Changes(gate_up, down, len(gate_up), len(down))


def _products(stack: StackRecipe) -> ExpertProducts | None:
    form, first = stack.form, stack.storage[0]
    if not isinstance(form, Addressable) or form.reordered:
        return None
    product = form.product(first, None if stack.bias is None else stack.bias[0])
    return ExpertProducts(first=product, stride=first.nbytes, panel=form.panel_bytes)
