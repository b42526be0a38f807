"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections in the checkpoint; partial rope and a window are optional."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Phi3(Decoder):
    """The decoder of Phi3ForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head, partial=True)
        window = settings.integer("sliding_window") if "sliding_window" in settings else None

        design = AttentionDesign(rope, fused=True)

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=GatedMLP(blueprint, f"{name}.mlp", dims, fused=True),
            )

        super().__init__(blueprint, dims, [window] * dims.layers, block)
