"""OLMo 2: norms after each sublayer instead of before it; query and key norms over all heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder
from infd.models.layers.attention import Attention
from infd.models.layers.branch import Then
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import NoNorm, OverAllHeads, RMSNorm
from infd.models.sizes import Sizes

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Olmo2(Decoder):
    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        sizes = Sizes.read(settings)
        rope = blueprint.rope(rope_parameters(settings), sizes.head)
        bias = settings.boolean("attention_bias", False)

        def block(name: str, layer: int, group: int) -> Block:
            def norm(part: str, size: int = sizes.hidden) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", size, sizes.norm_eps)

            attention = Attention(
                blueprint,
                f"{name}.self_attn",
                sizes,
                layer=layer,
                group=group,
                rope=rope,
                qkv_bias=bias,
                output_bias=bias,
                q_norm=OverAllHeads(norm("self_attn.q_norm", sizes.heads * sizes.head)),
                k_norm=OverAllHeads(norm("self_attn.k_norm", sizes.kv_heads * sizes.head)),
            )
            return Block(
                input_norm=NoNorm(),
                attention=Then(attention, norm("post_attention_layernorm")),
                post_norm=NoNorm(),
                mlp=Then(GatedMLP(blueprint, f"{name}.mlp", sizes), norm("post_feedforward_layernorm")),
            )

        super().__init__(blueprint, sizes, [None] * sizes.layers, block)
