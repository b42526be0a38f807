"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections in the checkpoint, and optional partial rope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.layers.attention import Attention
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.sizes import Sizes

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Phi3(Decoder):
    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        sizes = Sizes.read(settings)
        rope = blueprint.rope(rope_parameters(settings), sizes.head, partial=True)
        window = settings.integer("sliding_window") if "sliding_window" in settings else None

        def block(name: str, layer: int, group: int) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", sizes.hidden, sizes.norm_eps),
                attention=Attention(
                    blueprint, f"{name}.self_attn", sizes, layer=layer, group=group, rope=rope, fused=True
                ),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", sizes.hidden, sizes.norm_eps),
                mlp=GatedMLP(blueprint, f"{name}.mlp", sizes, fused=True),
            )

        super().__init__(blueprint, sizes, [window] * sizes.layers, block)
