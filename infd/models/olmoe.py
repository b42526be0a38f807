"""OLMoE: Llama with experts in every layer, and query and key norms over all heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, HeadNorms, LayerIndex
from infd.models.layers.experts import Experts, ExpertsDesign
from infd.models.layers.norm import OverAllHeads, RMSNorm
from infd.models.mixture import chosen, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Olmoe(Decoder):
    """The decoder of OlmoeForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        if "clip_qkv" in settings:
            raise settings.error("clip_qkv", "null, as in every published OLMoE", settings.number("clip_qkv"))
        dims = Dimensions.read(settings)
        bias = settings.boolean("attention_bias", False)
        renormalized = settings.boolean("norm_topk_prob", False)
        router = Router(experts=experts(settings), chosen=chosen(settings), least_sum=0.0 if renormalized else None)

        rope = blueprint.rope(rope_parameters(settings), dims.head)
        design = AttentionDesign(rope, qkv_bias=bias, output_bias=bias)
        mixture = ExpertsDesign(router, dims.inner)

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str, size: int = dims.hidden) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", size, dims.norm_eps)

            norms = HeadNorms(
                OverAllHeads(norm("self_attn.q_norm", dims.heads * dims.head)),
                OverAllHeads(norm("self_attn.k_norm", dims.kv_heads * dims.head)),
            )
            return Block(
                input_norm=norm("input_layernorm"),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index, norms),
                post_norm=norm("post_attention_layernorm"),
                mlp=Experts(blueprint, f"{name}.mlp", dims.hidden, mixture),
            )

        super().__init__(blueprint, dims, [None] * dims.layers, block)
