"""What a decoder layer computes, told as data: for kernels that compute whole layers in one call.

A layer's own code is the readable form, and what these kernels must equal. Whatever has no recipe is computed by its
own code. Tensors are the weights themselves: a recipe is made once they are loaded, and holds as long as they stay
where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.matrices import Form


class NormRecipe(NamedTuple):
    """RMSNorm. A norm of heads whose weight is as long as all of them together is over all of them together."""

    weight: Tensor
    eps: float
    offset: float


class ProductRecipe(NamedTuple):
    """x times a matrix in some form, transposed, plus a bias."""

    form: Form
    kept: Tensor
    bias: Tensor | None


# What a branch passes through before it is added to the residual stream: a norm, a factor, or nothing.
Last = NormRecipe | float | None


class AttentionRecipe(Struct, frozen=True, kw_only=True):
    """See models/layers/attention.py, whose words these are. `rope` [max_len, 2, R / 2] as in families.rope.Rope."""

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
    last: Last = None


class GatedRecipe(Struct, frozen=True, kw_only=True):
    """down(activation(gate) * up), gate and up stacked."""

    gate_up: ProductRecipe
    activation: str  # as configs name it
    down: ProductRecipe
    last: Last = None


class LayerRecipe(Struct, frozen=True, kw_only=True):
    """Attention, then the feed-forward part, each behind a norm, if there is one, and added to the residual stream."""

    input_norm: NormRecipe | None
    attention: AttentionRecipe
    post_norm: NormRecipe | None
    mlp: GatedRecipe
