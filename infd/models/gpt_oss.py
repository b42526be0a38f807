"""gpt-oss: Llama with biases, attention sinks, a window in every other layer, and clamped experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Gating, Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.experts import STACKED, Experts, ExpertsDesign
from infd.models.layers.norm import RMSNorm
from infd.models.mixture import chosen, experts
from infd.models.windows import FULL, SLIDING, layer_types, windows

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class GptOss(Decoder):
    """The decoder of GptOssForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        bias = settings.boolean("attention_bias", True)
        types = layer_types(settings, [FULL if layer % 2 else SLIDING for layer in range(dims.layers)])
        router = Router(experts=experts(settings), chosen=chosen(settings), scores="chosen")
        gating = Gating(
            alpha=settings.number("swiglu_alpha", 1.702), limit=settings.number("swiglu_limit", 7.0), offset=1.0
        )

        rope = blueprint.rope(rope_parameters(settings), dims.head)
        design = AttentionDesign(rope, qkv_bias=bias, output_bias=bias, sinks=True)
        mixture = ExpertsDesign(
            router,
            dims.inner,
            (STACKED._replace(turned=True, alternating=True),),
            gating,
            gate="router",
            gate_bias=True,
            bias=True,
        )

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=Experts(blueprint, f"{name}.mlp", dims.hidden, mixture),
            )

        super().__init__(blueprint, dims, windows(settings, types), block)
