"""An encoder's layers in one native call, and its embeddings in another: `native/encoder.cpp`.

If any product's form is not Addressable, or native code does not round its inputs, the layers run their own code.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.attention import Step
from infd.kernels.cpu.library import FLOAT, INT, POINTER, Library
from infd.kernels.cpu.product import Product, Unaddressable, described
from infd.kernels.cpu.span_attention import Plan
from infd.kernels.recipe import LayerNormRecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.encoder import TableRows
    from infd.kernels.families.span_attention import Reach, SpanPlan
    from infd.kernels.recipe import EncoderLayerRecipe, NormRecipe

SLICE = 4  # layers per call; before each call the device thread reports progress and can be stopped
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of Activation in `native/encoder.cpp`
GATED = ("none", "gate_up", "up_gate")


class Norm(ctypes.Structure):
    """The C structure EncoderNorm of `native/encoder.h`."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("eps", FLOAT), ("centered", INT))


class Layer(ctypes.Structure):
    """The C structure EncoderLayer of `native/encoder.h`."""

    _fields_ = (
        ("qkv", Product),
        ("output", Product),
        ("up", Product),
        ("down", Product),
        ("attention_norm", Norm),
        ("mlp_norm", Norm),
        ("normed_first", INT),
        ("gated", INT),
        ("activation", INT),
        ("rope", POINTER),
        ("turned", INT),
        ("heads", INT),
        ("kv_heads", INT),
        ("size", INT),
        ("scale", FLOAT),
        ("reach", INT),
        ("bias", POINTER),
        ("furthest", INT),
    )


class Table(ctypes.Structure):
    """The C structure EncoderTable of `native/encoder.h`."""

    _fields_ = (("numbers", POINTER), ("rows", INT), ("index", POINTER))


class EncoderStep(ctypes.Structure):
    """The C structure EncoderStep of `native/encoder.h`."""

    _fields_ = (
        ("tokens", INT),
        ("hidden", INT),
        ("positions", POINTER),
        ("attention", ctypes.POINTER(ctypes.POINTER(Step))),
    )


class EncoderStack:
    """Implements families.encoder.EncoderStack."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._compute = library.kernel("encoder", INT, POINTER, INT, POINTER, POINTER)
        self._embed = library.kernel("embed", INT, POINTER, INT, POINTER, INT, INT, POINTER)

    def build(self, layers: Sequence[EncoderLayerRecipe]) -> Stacked | None:
        try:
            return Stacked(self._compute, layers)
        except Unaddressable:
            return None

    def embed(self, parts: Sequence[TableRows], norm: LayerNormRecipe | None) -> Tensor | None:
        first = parts[0]
        assert first.rows is not None
        tables = (Table * len(parts))(
            *(Table(table.data_ptr(), len(table), None if rows is None else rows.data_ptr()) for table, rows in parts)
        )
        out = torch.empty(len(first.rows), first.table.shape[1], dtype=first.table.dtype)
        its_norm = None if norm is None else ctypes.byref(_norm(norm))
        self._embed(out.dtype is torch.bfloat16, tables, len(parts), its_norm, *out.shape, out.data_ptr())
        return out


class Stacked:
    """An encoder's layers as C structures. Implements families.encoder.StackedEncoder."""

    def __init__(self, compute: Callable[..., None], layers: Sequence[EncoderLayerRecipe]) -> None:
        self._compute = compute
        self._recipes = layers  # keeps alive the weights to which the structures point
        self._reaches: list[Reach] = sorted({each.reach for each in layers}, key=str)
        self._layers = (Layer * len(layers))(*(self._layer(each) for each in layers))

    def __call__(self, x: Tensor, positions: Tensor, plan: SpanPlan, beat: Callable[[], None]) -> Tensor:
        assert isinstance(plan, Plan)  # `select.py` chooses the native stack only with native attention
        x = x.contiguous()
        steps = [ctypes.pointer(plan.step(reach)) for reach in self._reaches]
        step = EncoderStep(
            tokens=x.shape[0],
            hidden=x.shape[1],
            positions=positions.data_ptr(),
            attention=(ctypes.POINTER(Step) * len(steps))(*steps),
        )
        biases: dict[int, Tensor] = {}
        for layer, recipe in zip(self._layers, self._recipes, strict=True):
            if recipe.bias is not None:  # computed from weights, which a load of weights may have changed
                table = biases.setdefault(id(recipe.bias), recipe.bias.table)
                layer.bias, layer.furthest = table.data_ptr(), table.shape[1] // 2
        for first in range(0, len(self._layers), SLICE):
            beat()
            count = min(SLICE, len(self._layers) - first)
            layers = ctypes.addressof(self._layers) + first * ctypes.sizeof(Layer)
            self._compute(x.dtype is torch.bfloat16, layers, count, ctypes.addressof(step), x.data_ptr())
        return x

    def _layer(self, recipe: EncoderLayerRecipe) -> Layer:
        layer = Layer(
            qkv=described(recipe.qkv),
            output=described(recipe.output),
            up=described(recipe.up),
            down=described(recipe.down),
            attention_norm=_norm(recipe.attention_norm),
            mlp_norm=_norm(recipe.mlp_norm),
            normed_first=recipe.normed_first,
            gated=GATED.index(recipe.gated),
            activation=ACTIVATIONS.index(recipe.activation),
            heads=recipe.heads,
            kv_heads=recipe.kv_heads,
            size=recipe.head_size,
            scale=recipe.scale,
            reach=self._reaches.index(recipe.reach),
        )
        if recipe.rope is not None:
            layer.rope, layer.turned = recipe.rope.data_ptr(), 2 * recipe.rope.shape[2]
        return layer


def _norm(recipe: LayerNormRecipe | NormRecipe | None) -> Norm:
    if recipe is None:
        return Norm()
    bias = recipe.bias if isinstance(recipe, LayerNormRecipe) else None
    return Norm(
        weight=recipe.weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        eps=recipe.eps,
        centered=isinstance(recipe, LayerNormRecipe),
    )
