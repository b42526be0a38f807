"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.experts import DiskLayout, Experts, ExpertsDesign
from infd.models.layers.norm import RMSNorm
from infd.models.mixture import chosen, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings

NUMBERED = DiskLayout(("experts.{}.w1.weight", "experts.{}.w3.weight"), "experts.{}.w2.weight")


class Mixtral(Decoder):
    """The decoder of MixtralForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        window = settings.integer("sliding_window") if "sliding_window" in settings else None
        router = Router(experts=experts(settings), chosen=chosen(settings), least_sum=0.0)

        design = AttentionDesign(blueprint.rope(rope_parameters(settings), dims.head))
        mixture = ExpertsDesign(router, dims.inner, (NUMBERED,))

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=Experts(blueprint, f"{name}.block_sparse_moe", dims.hidden, mixture),
            )

        super().__init__(blueprint, dims, [window] * dims.layers, block)
