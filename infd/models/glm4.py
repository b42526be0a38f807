"""GLM-4 (0414): a norm before and after each sublayer; interleaved rope over half of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.layers.sublayer import Transformed

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Glm4(Decoder):
    """The decoder of Glm4ForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head, partial=True)
        bias = settings.boolean("attention_bias")

        design = AttentionDesign(rope, interleaved=True, qkv_bias=bias)

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", dims.hidden, dims.norm_eps)

            return Block(
                input_norm=norm("input_layernorm"),
                attention=Transformed(
                    Attention(
                        blueprint,
                        f"{name}.self_attn",
                        dims,
                        design,
                        index,
                    ),
                    norm("post_self_attn_layernorm"),
                ),
                post_norm=norm("post_attention_layernorm"),
                mlp=Transformed(GatedMLP(blueprint, f"{name}.mlp", dims, fused=True), norm("post_mlp_layernorm")),
            )

        super().__init__(blueprint, dims, [None] * dims.layers, block)
