"""Llama (2, 3, 3.1, 3.2): the plain decoder. Other families' docstrings state their differences from Llama."""

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


class Llama(Decoder):
    """The decoder of LlamaForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint, *, window: int | None = None) -> None:
        """Declare the model's weights. Raises CheckpointError.

        window  attention window of every layer, in tokens; None: full attention
        """
        dims = Dimensions.read(settings)
        rope = blueprint.rope(rope_parameters(settings), dims.head)
        attention_bias = settings.boolean("attention_bias", False)
        mlp_bias = settings.boolean("mlp_bias", False)

        design = AttentionDesign(rope, qkv_bias=attention_bias, output_bias=attention_bias)

        def block(name: str, index: LayerIndex) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", dims.hidden, dims.norm_eps),
                attention=Attention(
                    blueprint,
                    f"{name}.self_attn",
                    dims,
                    design,
                    index,
                ),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", dims.hidden, dims.norm_eps),
                mlp=GatedMLP(blueprint, f"{name}.mlp", dims, bias=mlp_bias),
            )

        super().__init__(blueprint, dims, [window] * dims.layers, block)
