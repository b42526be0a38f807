"""ERNIE 4.5 MoE: Llama with interleaved rope, then experts in some layers beside shared ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder, DecoderConstants
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.experts import ExpertsDesign
from infd.models.layers.norm import RMSNorm
from infd.models.mixture import Mixture, chosen, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Ernie4_5Moe(Decoder):
    """The decoder of Ernie4_5_MoeForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        bias, inner = settings.boolean("use_bias", False), settings.integer("moe_intermediate_size")
        router = Router(
            experts=experts(settings),
            chosen=chosen(settings, "num_experts_per_tok" if "num_experts_per_tok" in settings else "moe_k"),
            least_sum=settings.number("moe_norm_min", 1e-12),
        )
        end = settings.integer("moe_layer_end_index", least=-1)
        sparse = range(
            settings.integer("moe_layer_start_index", least=0), dims.layers if end == -1 else min(end + 1, dims.layers)
        )
        interval = settings.integer("moe_layer_interval", 1)
        count = settings.integer("moe_num_shared_experts", least=0)

        rope = blueprint.rope(rope_parameters(settings), dims.head)
        design = AttentionDesign(rope, interleaved=True, qkv_bias=bias, output_bias=bias)
        mixture = Mixture(
            design=ExpertsDesign(router, inner, correction="moe_statics.e_score_correction_bias"),
            sparse=[layer for layer in sparse if (layer + 1) % interval == 0],
            shared=("shared_experts", count * inner) if count else None,
            bias=bias,
        )

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=mixture.network(blueprint, f"{name}.mlp", dims, index.layer),
            )

        super().__init__(blueprint, dims, [None] * dims.layers, block, DecoderConstants(head_bias=bias))
