"""Granite 3 MoE: Granite with experts in every layer, and optional shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from infd.kernels.router import Router
from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder, DecoderConstants
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.experts import DiskLayout, Experts, ExpertsDesign, Shared
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.layers.sublayer import Multiplier, Transformed
from infd.models.mixture import chosen, experts

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings

STACKED = DiskLayout(("input_linear.weight",), "output_linear.weight")


class GraniteMoe(Decoder):
    """The decoder of GraniteMoeForCausalLM and of GraniteMoeSharedForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head)
        scale = settings.number("attention_multiplier", 1.0)
        added = Multiplier(settings.number("residual_multiplier", 1.0))
        bias = settings.boolean("attention_bias", False)
        shared = replace(dims, inner=settings.integer("shared_intermediate_size", 0, least=0))
        router = Router(experts=experts(settings), chosen=chosen(settings), scores="chosen")

        design = AttentionDesign(rope, scale=scale, qkv_bias=bias, output_bias=bias)
        mixture = ExpertsDesign(router, dims.inner, (STACKED,), gate="router.layer")

        def block(name: str, index: LayerIndex) -> Block:
            common = None
            if shared.inner:
                inside, both, down = f"{name}.shared_mlp", "input_linear", "output_linear"
                apart = f"{inside}.gate_proj.weight" in blueprint.stored  # in GGUF
                common = Shared(GatedMLP(blueprint, inside, shared, fused=not apart, both=both, down=down))
            network = Experts(blueprint, f"{name}.block_sparse_moe", dims.hidden, mixture, common)
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Transformed(Attention(blueprint, f"{name}.self_attn", dims, design, index), added),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=Transformed(network, added),
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
