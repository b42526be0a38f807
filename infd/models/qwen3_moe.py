"""Qwen3-MoE: Qwen3 with experts in some layers; a sliding window, if there is one, is in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, HeadNorms, LayerIndex
from infd.models.layers.experts import ExpertsDesign
from infd.models.layers.norm import RMSNorm
from infd.models.mixture import Mixture, chosen, every, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Qwen3Moe(Decoder):
    """The decoder of Qwen3MoeForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        bias = settings.boolean("attention_bias", False)
        windowed = settings.boolean("use_sliding_window", False)
        window = settings.integer("sliding_window", 4096) if windowed else None
        renormalized = settings.boolean("norm_topk_prob", False)
        router = Router(experts=experts(settings), chosen=chosen(settings), least_sum=0.0 if renormalized else None)

        rope = blueprint.rope(rope_parameters(settings), dims.head)
        design = AttentionDesign(rope, qkv_bias=bias, output_bias=bias)
        mixture = Mixture(
            design=ExpertsDesign(router, settings.integer("moe_intermediate_size")), sparse=every(settings, dims.layers)
        )

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str, size: int = dims.hidden) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", size, dims.norm_eps)

            norms = HeadNorms(norm("self_attn.q_norm", dims.head), norm("self_attn.k_norm", dims.head))
            return Block(
                input_norm=norm("input_layernorm"),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index, norms),
                post_norm=norm("post_attention_layernorm"),
                mlp=mixture.network(blueprint, f"{name}.mlp", dims, index.layer),
            )

        super().__init__(blueprint, dims, [window] * dims.layers, block)
