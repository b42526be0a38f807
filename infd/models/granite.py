"""Granite 3 (dense): Llama with fixed multipliers on embeddings, attention scores, residual additions and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder, DecoderConstants
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.layers.sublayer import Multiplier, Transformed

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Granite(Decoder):
    """The decoder of GraniteForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head)
        scale = settings.number("attention_multiplier", 1.0)
        added = Multiplier(settings.number("residual_multiplier", 1.0))
        attention_bias = settings.boolean("attention_bias", False)
        mlp_bias = settings.boolean("mlp_bias", False)

        design = AttentionDesign(rope, scale=scale, qkv_bias=attention_bias, output_bias=attention_bias)

        def block(name: str, index: LayerIndex) -> Block:
            attention = Attention(
                blueprint,
                f"{name}.self_attn",
                dims,
                design,
                index,
            )
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Transformed(attention, added),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=Transformed(GatedMLP(blueprint, f"{name}.mlp", dims, bias=mlp_bias), added),
            )

        super().__init__(
            blueprint,
            dims,
            [None] * dims.layers,
            block,
            DecoderConstants(
                embedding_scale=settings.number("embedding_multiplier", 1.0),
                logit_scale=1 / settings.number("logits_scaling", 1.0),
            ),
        )
