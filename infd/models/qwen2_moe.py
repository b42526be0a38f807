"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in some layers, beside a shared expert with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.experts import ExpertsDesign
from infd.models.layers.norm import RMSNorm
from infd.models.mixture import Mixture, chosen, every, experts
from infd.models.windows import from_some_layer_on

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Qwen2Moe(Decoder):
    """The decoder of Qwen2MoeForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        renormalized = settings.boolean("norm_topk_prob", False)
        router = Router(experts=experts(settings), chosen=chosen(settings), least_sum=0.0 if renormalized else None)

        rope = blueprint.rope(rope_parameters(settings), dims.head)
        design = AttentionDesign(rope, qkv_bias=settings.boolean("qkv_bias", True))
        mixture = Mixture(
            design=ExpertsDesign(router, settings.integer("moe_intermediate_size")),
            sparse=every(settings, dims.layers),
            shared=("shared_expert", settings.integer("shared_expert_intermediate_size")),
            shared_gate="shared_expert_gate",
        )

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=mixture.network(blueprint, f"{name}.mlp", dims, index.layer),
            )

        super().__init__(blueprint, dims, from_some_layer_on(settings, dims.layers), block)
