"""OLMo 2: norms after each sublayer instead of before it; query and key norms over all heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, HeadNorms, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import NoNorm, OverAllHeads, RMSNorm
from infd.models.layers.sublayer import Transformed

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Olmo2(Decoder):
    """The decoder of Olmo2ForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head)
        bias = settings.boolean("attention_bias", False)

        design = AttentionDesign(rope, qkv_bias=bias, output_bias=bias)

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str, size: int = dims.hidden) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", size, dims.norm_eps)

            attention = Attention(
                blueprint,
                f"{name}.self_attn",
                dims,
                design,
                index,
                HeadNorms(
                    OverAllHeads(norm("self_attn.q_norm", dims.heads * dims.head)),
                    OverAllHeads(norm("self_attn.k_norm", dims.kv_heads * dims.head)),
                ),
            )
            return Block(
                input_norm=NoNorm(),
                attention=Transformed(attention, norm("post_attention_layernorm")),
                post_norm=NoNorm(),
                mlp=Transformed(GatedMLP(blueprint, f"{name}.mlp", dims), norm("post_feedforward_layernorm")),
            )

        super().__init__(blueprint, dims, [None] * dims.layers, block)
