"""Phi-3.5-MoE: Llama with LayerNorm, optional biases, longrope, and experts that a sparse mixer chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder, DecoderConstants
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.experts import Experts, ExpertsDesign
from infd.models.layers.norm import LayerNorm
from infd.models.mixtral import NUMBERED
from infd.models.mixture import chosen, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Phimoe(Decoder):
    """The decoder of PhimoeForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        bias = settings.boolean("attention_bias", False)
        window = settings.integer("sliding_window") if "sliding_window" in settings else None
        margin = 2 * settings.number("router_jitter_noise")
        router = Router(experts=experts(settings), chosen=chosen(settings), scores="margin", margin=margin)

        design = AttentionDesign(blueprint.rope(_rope(settings), dims.head), qkv_bias=bias, output_bias=bias)
        mixture = ExpertsDesign(router, dims.inner, (NUMBERED,))

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=LayerNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=LayerNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=Experts(blueprint, f"{name}.block_sparse_moe", dims.hidden, mixture),
            )

        constants = DecoderConstants(head_bias=settings.boolean("lm_head_bias", False), layer_norm=True)
        super().__init__(blueprint, dims, [window] * dims.layers, block, constants)


def _rope(settings: Settings) -> Settings:
    """Return the rotary settings, with the amplitude that Phi-MoE states twice. Raises CheckpointError."""
    rope = rope_parameters(settings)
    if "short_mscale" not in rope:
        return rope
    amplitude = rope.number("short_mscale")
    if amplitude != rope.number("long_mscale"):
        raise rope.error("long_mscale", f"{amplitude}, as short_mscale", rope.number("long_mscale"))
    return rope.completed({}, {"attention_factor": amplitude})
