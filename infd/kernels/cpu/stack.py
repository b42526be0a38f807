"""Several decoder layers in one native call, `native/stack.cpp`; and steps of a whole decoder, `native/decoder.cpp`.

The calls compute the same operations in the same order as the layers' own code, so results are bitwise equal. If
any product's form is not Addressable, or native code does not round its inputs, the layers run their own code.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from infd.kernels.cpu import experts
from infd.kernels.cpu.attention import Plan, Step
from infd.kernels.cpu.library import FLOAT, INT, MEMORY, POINTER, Library, uninterrupted
from infd.kernels.cpu.product import Addressable, DecoderTable, Product, Unaddressable, described
from infd.kernels.recipe import ExpertsRecipe, LayerNormRecipe, NormRecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.families.stack import LayersBatch, StepBuffers, StepMemory
    from infd.kernels.families.stack import Stacked as StackedLayers
    from infd.kernels.recipe import DecoderRecipe, GatedRecipe, LayerRecipe, OutputTransform

    Array = npt.NDArray[Any]

BRIEF = 2**19  # logits that `keep` masks at most while it holds the interpreter's lock: 0.2 ms
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


class Decoder(ctypes.Structure):
    """The C structure Decoder of `native/decoder.h`."""

    _fields_ = (
        ("embedding", DecoderTable),
        ("layers", ctypes.POINTER(Layer)),
        ("count", INT),
        ("norm", Norm),
        ("head", Product),
        ("logit_scale", FLOAT),
    )


class Group(ctypes.Structure):
    """The C structure DecoderGroup of `native/decoder.h`."""

    _fields_ = (("page_tokens", INT), ("window", INT))


class Memory(ctypes.Structure):
    """The C structure DecoderMemory of `native/decoder.h`."""

    _fields_ = (
        ("tokens", POINTER),
        ("tokens_stride", INT),
        ("length", POINTER),
        ("tables", POINTER),
        ("groups", INT),
        ("pages", INT),
        ("group", ctypes.POINTER(Group)),
        ("pulse", POINTER),
    )


class DecoderStep(ctypes.Structure):
    """The C structure DecoderStep of `native/decoder.h`."""

    _fields_ = (
        ("spans", INT),
        ("tokens", INT),
        ("span_row", POINTER),
        ("bound", POINTER),
        ("counts", POINTER),
        ("shift", POINTER),
        ("append", INT),
        ("row", POINTER),
        ("end", POINTER),
        ("logits", POINTER),
        ("largest", POINTER),
        ("token", POINTER),
        ("verdict", POINTER),
        ("kept", POINTER),
        ("routes", POINTER),
        ("routing_layers", INT),
    )


class Stack:
    """Implements families.stack.Stack."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._compute = library.kernel("stack", INT, POINTER, INT, POINTER, POINTER, POINTER, INT, INT)
        self._decode = library.kernel("decoder", INT, POINTER, POINTER, POINTER)
        self._keep = library.kernel("keep", POINTER, POINTER, INT, POINTER, INT)

    def build(self, layers: Sequence[LayerRecipe]) -> Stacked | None:
        try:
            return Stacked(self._compute, layers)
        except Unaddressable:
            return None

    def decoder(
        self, layers: StackedLayers, ends: DecoderRecipe, memory: StepMemory, buffers: StepBuffers
    ) -> FusedDecoder | None:
        assert isinstance(layers, Stacked)
        try:
            return FusedDecoder(self._decode, self._keep, layers, ends, memory, buffers)
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
        self.reading(batch.cache)
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

    def reading(self, cache: Sequence[KeyValuePages]) -> ctypes.Array[Layer]:
        """Return the layers' structures, which refer to `cache`."""
        if cache is not self._cache:
            self._point_to(cache)
        return self._layers

    def _point_to(self, cache: Sequence[KeyValuePages]) -> None:
        for layer, recipe in zip(self._layers, self._recipes, strict=True):
            pages = cache[recipe.attention.layer]
            layer.k, layer.v = pages.k.data_ptr(), pages.v.data_ptr()
            layer.quantized = pages.k.dtype is torch.int8
        self._cache = cache


class FusedDecoder:
    """A decoder as C structures. Implements families.stack.FusedDecoder."""

    def __init__(
        self,
        compute: Callable[..., None],
        keep: Callable[..., None],
        layers: Stacked,
        ends: DecoderRecipe,
        memory: StepMemory,
        buffers: StepBuffers,
    ) -> None:
        """Describe the decoder. compute, keep: the kernels. Raises Unaddressable."""
        self._compute, self._layers, self._cache = compute, layers, memory.cache
        self._keep, self._keep_briefly = keep, uninterrupted(keep)
        self._kept = ends, memory, buffers  # the memory to which the structures point
        if not isinstance(ends.embedding.form, Addressable):
            raise Unaddressable
        structures = layers.reading(memory.cache)
        decoder = Decoder(
            embedding=ends.embedding.form.table(ends.embedding.storage, ends.embedding.scale),
            layers=structures,
            count=len(structures),
            norm=_norm(ends.norm),
            head=described(ends.head.product),
            logit_scale=ends.head.scale,
        )
        state = memory.state
        groups = (Group * len(memory.groups))(*(Group(size, window or 0) for size, window in memory.groups))
        lasting = Memory(
            tokens=state.tokens.data_ptr(),
            tokens_stride=state.tokens.stride(0),
            length=state.length.data_ptr(),
            tables=state.tables.data_ptr(),
            groups=state.tables.shape[1],
            pages=state.tables.shape[2],
            group=groups,
            pulse=memory.pulse,
        )
        pointers = {name: tensor.data_ptr() for name, tensor in buffers._asdict().items()}
        self._step = DecoderStep(**pointers)
        self._structures = decoder, lasting
        half = ends.norm.weight.dtype is torch.bfloat16
        self._arguments = (half, *map(ctypes.addressof, (decoder, lasting, self._step)))
        self._vocabulary = buffers.logits.shape[1]
        self._of_step = (ctypes.addressof(lasting), ctypes.addressof(self._step), self._vocabulary)

    def __call__(self, spans: int, tokens: int, routes: Tensor | None = None) -> None:
        step = self._step
        step.spans, step.tokens, step.append = spans, tokens, spans == tokens
        step.routes = None if routes is None else routes.data_ptr()
        step.routing_layers = 0 if routes is None else routes.shape[1]
        self._layers.reading(self._cache)
        self._compute(*self._arguments)

    def keep(self, mask: Array | None) -> None:
        if mask is None:
            self._keep_briefly(*self._of_step, None, 0)
            return
        assert mask.flags.c_contiguous
        keep = self._keep_briefly if len(mask) * self._vocabulary <= BRIEF else self._keep
        keep(*self._of_step, MEMORY.from_buffer(mask.data), mask.shape[1])


def _native(plan: AttentionPlan | None) -> Plan:
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
