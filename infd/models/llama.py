"""Llama (2, 3, 3.1, 3.2): the plain decoder, from which the other families differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infd.models.config import Settings
from infd.models.decoder import Block, Decoder, Sizes
from infd.models.layers.attention import Attention
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.layers.rope import rope_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.models.parameter import Blueprint


class Llama(Decoder):
    def __init__(self, config: Mapping[str, Any], blueprint: Blueprint, *, window: int | None = None) -> None:
        """Declare the model that config.json describes. `window` bounds what a query sees in every layer."""
        settings = Settings(config)
        sizes = Sizes.read(settings)
        rope = rope_table(settings, sizes.head, blueprint.max_len, blueprint.device)
        attention_bias = settings.boolean("attention_bias", False)
        mlp_bias = settings.boolean("mlp_bias", False)

        def block(name: str, layer: int, group: int) -> Block:
            return Block(
                input_norm=RMSNorm(blueprint, f"{name}.input_layernorm", sizes.hidden, sizes.norm_eps),
                attention=Attention(
                    blueprint,
                    f"{name}.self_attn",
                    hidden_size=sizes.hidden,
                    heads=sizes.heads,
                    kv_heads=sizes.kv_heads,
                    head_size=sizes.head,
                    rope=rope,
                    layer=layer,
                    group=group,
                    qkv_bias=attention_bias,
                    output_bias=attention_bias,
                ),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", sizes.hidden, sizes.norm_eps),
                mlp=GatedMLP(blueprint, f"{name}.mlp", sizes.hidden, sizes.inner, bias=mlp_bias),
            )

        super().__init__(blueprint, sizes, [window] * sizes.layers, block)
