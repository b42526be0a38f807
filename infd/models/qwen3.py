"""Qwen3 (dense): Llama with normed query and key heads, and a sliding window in the layers that ask for it."""

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


class Qwen3(Decoder):
    def __init__(self, config: Mapping[str, Any], blueprint: Blueprint) -> None:
        settings = Settings(config)
        sizes = Sizes.read(settings, head=128)
        rope = rope_table(settings, sizes.head, blueprint.max_len, blueprint.device)
        bias = settings.boolean("attention_bias", False)

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
                    qkv_bias=bias,
                    output_bias=bias,
                    q_norm=RMSNorm(blueprint, f"{name}.self_attn.q_norm", sizes.head, sizes.norm_eps),
                    k_norm=RMSNorm(blueprint, f"{name}.self_attn.k_norm", sizes.head, sizes.norm_eps),
                ),
                post_norm=RMSNorm(blueprint, f"{name}.post_attention_layernorm", sizes.hidden, sizes.norm_eps),
                mlp=GatedMLP(blueprint, f"{name}.mlp", sizes.hidden, sizes.inner, bias=False),
            )

        super().__init__(blueprint, sizes, _windows(settings, sizes.layers), block)


def _windows(settings: Settings, layers: int) -> list[int | None]:
    """Return the window of each layer: stated layer by layer, or for those from max_window_layers on."""
    if not settings.boolean("use_sliding_window", False):
        return [None] * layers
    window = settings.integer("sliding_window", 4096)
    if "layer_types" not in settings:
        first = settings.integer("max_window_layers", 28, least=0)
        return [window if layer >= first else None for layer in range(layers)]
    windows = {"full_attention": None, "sliding_attention": window}
    types = settings.strings("layer_types")
    if len(types) != layers or not set(types) <= set(windows):
        raise settings.error("layer_types", f"{layers} of {', '.join(windows)}", types)
    return [windows[kind] for kind in types]
