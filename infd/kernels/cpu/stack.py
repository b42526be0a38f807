"""Several decoder layers in one native call: `native/stack.cpp`.

The call computes the same operations in the same order as the layers' own code, so results are bitwise equal. If
any product's form is not Addressable, or native code does not round its inputs, the layers run their own code.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu import experts
from infd.kernels.cpu.attention import Plan, Step
from infd.kernels.cpu.library import FLOAT, INT, POINTER, Library
from infd.kernels.cpu.product import Product, Unaddressable, described
from infd.kernels.recipe import ExpertsRecipe, LayerNormRecipe, NormRecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.families.stack import LayersBatch
    from infd.kernels.recipe import GatedRecipe, LayerRecipe, OutputTransform

SLICE = 4  # layers per call; before each call the device thread reports progress and can be stopped
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


class Norm(ctypes.Structure):
    """The C structure StackNorm of `native/stack.h`."""

    _fields_ = (
        ("weight", POINTER),
        ("size", INT),
        ("eps", FLOAT),
        ("offset", FLOAT),
        ("bias", POINTER),
        ("centered", INT),
    )


class Transform(ctypes.Structure):
    """The C structure StackTransform of `native/stack.h`."""

    _fields_ = (("norm", Norm), ("factor", FLOAT))


class Layer(ctypes.Structure):
    """The C structure StackLayer of `native/stack.h`."""

    _fields_ = (
        ("input_norm", Norm),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("post_norm", Norm),
        ("qkv", Product),
        ("output", Product),
        ("gate_up", Product),
        ("down", Product),
        ("shared_gate", Product),
        ("experts", ctypes.POINTER(experts.Layer)),
        ("attention_transform", Transform),
        ("mlp_transform", Transform),
        ("rope", POINTER),
        ("temperature", POINTER),
        ("sinks", POINTER),
        ("turned", INT),
        ("interleaved", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("size", INT),
        ("scale", FLOAT),
        ("softcap", FLOAT),
        ("gelu", INT),
        ("group", INT),
        ("quantized", INT),
        ("k", POINTER),
        ("v", POINTER),
    )


class StackStep(ctypes.Structure):
    """The C structure StackStep of `native/stack.h`."""

    _fields_ = (
        ("tokens", INT),
        ("hidden", INT),
        ("positions", POINTER),
        ("groups", ctypes.POINTER(ctypes.POINTER(Step))),
        ("slots", ctypes.POINTER(POINTER)),
        ("sampled", INT),
        ("sampled_tokens", POINTER),
        ("sampled_attention", ctypes.POINTER(Step)),
        ("routes", POINTER),
        ("routing_layers", INT),
    )


class Stack:
    """Implements families.stack.Stack."""

    def __init__(self, library: Library | None = None) -> None:
        self._compute = (library or Library()).kernel("stack", INT, POINTER, INT, POINTER, POINTER, POINTER, INT, INT)

    def build(self, layers: Sequence[LayerRecipe]) -> Stacked | None:
        try:
            return Stacked(self._compute, layers)
        except Unaddressable:
            return None


class Stacked:
    """Decoder layers as C structures. Implements families.stack.Stacked."""

    def __init__(self, compute: Callable[..., None], layers: Sequence[LayerRecipe]) -> None:
        self._compute = compute
        self._recipes = layers  # keeps alive the weights to which the structures point
        self._described = [_layer(each) for each in layers]  # keeps alive the experts' structures
        self._layers = (Layer * len(layers))(*self._described)
        self._cache: Sequence[KeyValuePages] | None = None

    def __call__(self, x: Tensor, batch: LayersBatch) -> tuple[Tensor, Tensor]:
        if batch.cache is not self._cache:
            self._point_to(batch.cache)
        plans = [_native(plan) for plan in batch.attention]
        step = StackStep(
            tokens=x.shape[0],
            hidden=x.shape[1],
            positions=batch.positions.data_ptr(),
            groups=(ctypes.POINTER(Step) * len(plans))(*(ctypes.pointer(plan.step) for plan in plans)),
            slots=(POINTER * len(plans))(*(plan.slots.data_ptr() for plan in plans)),
        )
        if (routes := batch.routes) is not None:
            step.routes, step.routing_layers = routes.data_ptr(), routes.shape[1]
        rest = slice(None)
        if (sampled := batch.sampled) is not None:
            step.sampled, step.sampled_tokens = len(sampled.tokens), sampled.tokens.data_ptr()
            step.sampled_attention = ctypes.pointer(_native(sampled.attention).step)
            rest = slice(step.sampled)
        x = x.contiguous()
        stream = torch.empty_like(x)
        for first in range(0, len(self._layers), SLICE):
            batch.beat()
            count = min(SLICE, len(self._layers) - first)
            layers = ctypes.addressof(self._layers) + first * ctypes.sizeof(Layer)
            self._compute(
                x.dtype is torch.bfloat16,
                layers,
                count,
                ctypes.addressof(step),
                x.data_ptr(),
                stream.data_ptr(),
                first == 0,
                first + count == len(self._layers),
            )
        return x[rest], stream[rest]

    def _point_to(self, cache: Sequence[KeyValuePages]) -> None:
        for layer, recipe in zip(self._layers, self._recipes, strict=True):
            pages = cache[recipe.attention.layer]
            layer.k, layer.v = pages.k.data_ptr(), pages.v.data_ptr()
            layer.quantized = pages.k.dtype is torch.int8
        self._cache = cache


def _native(plan: AttentionPlan) -> Plan:
    assert isinstance(plan, Plan)  # `select.py` chooses the native stack only with native attention
    return plan


def _layer(recipe: LayerRecipe) -> Layer:
    attention, mlp = recipe.attention, recipe.mlp
    layer = Layer(
        input_norm=_norm(recipe.input_norm),
        q_norm=_norm(attention.q_norm),
        k_norm=_norm(attention.k_norm),
        post_norm=_norm(recipe.post_norm),
        qkv=described(attention.qkv),
        output=described(attention.output),
        attention_transform=_transform(attention.output_transform),
        mlp_transform=_transform(mlp.output_transform),
        rope=attention.rope.data_ptr(),
        temperature=None if attention.temperature is None else attention.temperature.data_ptr(),
        sinks=None if attention.sinks is None else attention.sinks.data_ptr(),
        turned=2 * attention.rope.shape[2],
        interleaved=attention.interleaved,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        size=attention.head_size,
        scale=attention.scale,
        softcap=attention.softcap or 0,
        group=attention.group,
    )
    if isinstance(mlp, ExpertsRecipe):
        _mix(layer, mlp)
    else:
        _feed(layer, mlp)
    return layer


def _feed(layer: Layer, mlp: GatedRecipe) -> None:
    assert mlp.activation in ACTIVATIONS
    layer.gate_up, layer.down = described(mlp.gate_up), described(mlp.down)
    layer.gelu = mlp.activation == "gelu_pytorch_tanh"


def _mix(layer: Layer, mlp: ExpertsRecipe) -> None:
    mixture = experts.layer_of(mlp)
    if mixture is None:
        raise Unaddressable
    layer.experts = ctypes.pointer(mixture)
    if mlp.shared is not None:
        _feed(layer, mlp.shared.mlp)
        if mlp.shared.gate is not None:
            layer.shared_gate = described(mlp.shared.gate)


def _norm(recipe: NormRecipe | LayerNormRecipe | None) -> Norm:
    if recipe is None:
        return Norm()
    if isinstance(recipe, LayerNormRecipe):
        bias = None if recipe.bias is None else recipe.bias.data_ptr()
        return Norm(weight=recipe.weight.data_ptr(), size=recipe.weight.numel(), eps=recipe.eps, bias=bias, centered=1)
    return Norm(weight=recipe.weight.data_ptr(), size=recipe.weight.numel(), eps=recipe.eps, offset=recipe.offset)


def _transform(transform: OutputTransform) -> Transform:
    if isinstance(transform, NormRecipe):
        return Transform(norm=_norm(transform), factor=1)
    return Transform(factor=1 if transform is None else transform)
