"""Gemma 2: a norm before and after each sublayer, every other layer windowed, softcapped scores and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder, DecoderConstants
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.layers.sublayer import Transformed
from infd.models.windows import FULL, SLIDING, layer_types, windows

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings

OFFSET = 1.0  # added to the norms' weights: checkpoints store the weights minus 1


def embedding_scale(hidden: int, dtype: torch.dtype) -> float:
    """Return sqrt(hidden) rounded to `dtype`, as in training: for hidden = 3072 in bfloat16 55.5, not 55.43."""
    return float(torch.tensor(hidden**0.5, dtype=dtype))


class Gemma2(Decoder):
    """The decoder of Gemma2ForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        types = layer_types(settings, [FULL if layer % 2 else SLIDING for layer in range(dims.layers)])
        rope = blueprint.rope(rope_parameters(settings), dims.head)
        scale = settings.number("query_pre_attn_scalar") ** -0.5
        softcap = settings.number_or_none("attn_logit_softcapping")
        bias = settings.boolean("attention_bias", False)

        design = AttentionDesign(rope, scale=scale, softcap=softcap, qkv_bias=bias, output_bias=bias)

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", dims.hidden, dims.norm_eps, offset=OFFSET)

            attention = Attention(
                blueprint,
                f"{name}.self_attn",
                dims,
                design,
                index,
            )
            return Block(
                input_norm=norm("input_layernorm"),
                attention=Transformed(attention, norm("post_attention_layernorm")),
                post_norm=norm("pre_feedforward_layernorm"),
                mlp=Transformed(GatedMLP(blueprint, f"{name}.mlp", dims), norm("post_feedforward_layernorm")),
            )

        super().__init__(
            blueprint,
            dims,
            windows(settings, types),
            block,
            DecoderConstants(
                embedding_scale=embedding_scale(dims.hidden, blueprint.dtype),
                norm_offset=OFFSET,
                logit_softcap=settings.number_or_none("final_logit_softcapping"),
            ),
        )
