"""Qwen2 and Qwen2.5 (dense): Llama with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.dimensions import Dimensions
from infd.models.layers.attention import Attention, AttentionDesign, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.windows import from_some_layer_on

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Qwen2(Decoder):
    """The decoder of Qwen2ForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head)

        design = AttentionDesign(rope, qkv_bias=True)

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(blueprint, f"{name}.self_attn", dims, design, index),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=GatedMLP(blueprint, f"{name}.mlp", dims),
            )

        super().__init__(blueprint, dims, from_some_layer_on(settings, dims.layers), block)
