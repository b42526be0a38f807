"""Decoder layers as data, for kernels that compute whole layers in one call.

A layer's own code defines its result; kernels that compute recipes return equal results. Layers that a recipe cannot
express run their own code. A recipe references the weights' tensors, so it is made after loading, and is valid only
while the tensors keep their addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.matrices import Form


class NormRecipe(NamedTuple):
    """RMSNorm. In q_norm and k_norm, a weight [D] norms each head alone, a weight [H * D] a token's heads together."""

    weight: Tensor
    eps: float
    offset: float


class ProductRecipe(NamedTuple):
    """x W^T + bias. `storage` is the tensor that stores W, in the layout of `form`."""

    form: Form
    storage: Tensor
    bias: Tensor | None


# The transform of a sublayer's output before the residual addition: a norm, a factor, or none.
OutputTransform = NormRecipe | float | None


class AttentionRecipe(Struct, frozen=True, kw_only=True):
    """Attention; fields as in models/layers/attention.py. rope: the `table` of families.rope.Rope, [rows, 2, R / 2]."""

    layer: int
    group: int
    heads: int
    kv_heads: int
    head_size: int
    qkv: ProductRecipe
    q_norm: NormRecipe | None
    k_norm: NormRecipe | None
    rope: Tensor
    interleaved: bool
    scale: float
    softcap: float | None
    output: ProductRecipe
    output_transform: OutputTransform = None


class GatedRecipe(Struct, frozen=True, kw_only=True):
    """The feed-forward network down(activation(gate) * up). gate_up: the matrices of gate and up, stacked."""

    gate_up: ProductRecipe
    activation: str  # config.json's name: silu or gelu_pytorch_tanh
    down: ProductRecipe
    output_transform: OutputTransform = None


class LayerRecipe(Struct, frozen=True, kw_only=True):
    """Attention, then the feed-forward network, each preceded by an optional norm and added to the residual stream."""

    input_norm: NormRecipe | None
    attention: AttentionRecipe
    post_norm: NormRecipe | None
    mlp: GatedRecipe
