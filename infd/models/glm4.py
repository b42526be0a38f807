"""GLM-4 (0414): a norm before and after each sublayer; interleaved rope over half of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.layers.attention import Attention
from infd.models.layers.branch import Then
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.sizes import Sizes

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Glm4(Decoder):
    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        sizes = Sizes.read(settings)
        rope = blueprint.rope(rope_parameters(settings), sizes.head, partial=True)
        bias = settings.boolean("attention_bias")

        def block(name: str, layer: int, group: int) -> Block:
            def norm(part: str) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", sizes.hidden, sizes.norm_eps)

            return Block(
                input_norm=norm("input_layernorm"),
                attention=Then(
                    Attention(
                        blueprint,
                        f"{name}.self_attn",
                        sizes,
                        layer=layer,
                        group=group,
                        rope=rope,
                        interleaved=True,
                        qkv_bias=bias,
                    ),
                    norm("post_self_attn_layernorm"),
                ),
                post_norm=norm("post_attention_layernorm"),
                mlp=Then(GatedMLP(blueprint, f"{name}.mlp", sizes, fused=True), norm("post_mlp_layernorm")),
            )

        super().__init__(blueprint, sizes, [None] * sizes.layers, block)
