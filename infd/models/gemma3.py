"""Gemma 3: Gemma 2 with query and key norms in place of softcapped scores, and a separate rope for windowed layers.

EmbeddingGemma is its decoder without causality, with half of each window on either side.
Of a multimodal Gemma 3 only the text decoder is served; the weights of the vision tower are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.decoder import Block, Decoder, DecoderConstants
from infd.models.dimensions import Dimensions
from infd.models.gemma2 import OFFSET, embedding_scale
from infd.models.layers.attention import Attention, AttentionDesign, HeadNorms, LayerIndex
from infd.models.layers.mlp import GatedMLP
from infd.models.layers.norm import RMSNorm
from infd.models.layers.sublayer import Transformed
from infd.models.windows import FULL, SLIDING, layer_types, windows

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings

SIGHT = tuple(f"{root}{part}." for root in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))


class Gemma3(Decoder):
    """The decoder of Gemma3ForCausalLM and of Gemma3ForConditionalGeneration."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        if "attn_logit_softcapping" in settings:
            softcap = settings.number("attn_logit_softcapping")
            raise settings.error("attn_logit_softcapping", "null, as in every Gemma 3", softcap)
        seen = settings
        if settings.boolean("use_bidirectional_attention", False):
            seen = settings.completed({}, {"sliding_window": settings.integer("sliding_window", least=2) // 2})
        dims = Dimensions.read(settings)
        every = settings.integer("sliding_window_pattern", 6)
        types = layer_types(settings, [SLIDING if (i + 1) % every else FULL for i in range(dims.layers)])
        scale = settings.number("query_pre_attn_scalar") ** -0.5
        bias = settings.boolean("attention_bias", False)

        designs = {
            kind: AttentionDesign(
                blueprint.rope(rope_parameters(settings, kind), dims.head),
                scale=scale,
                qkv_bias=bias,
                output_bias=bias,
            )
            for kind in (FULL, SLIDING)
        }

        def block(name: str, index: LayerIndex) -> Block:
            def norm(part: str, size: int = dims.hidden) -> RMSNorm:
                return RMSNorm(blueprint, f"{name}.{part}", size, dims.norm_eps, offset=OFFSET)

            attention = Attention(
                blueprint,
                f"{name}.self_attn",
                dims,
                designs[types[index.layer]],
                index,
                HeadNorms(norm("self_attn.q_norm", dims.head), norm("self_attn.k_norm", dims.head)),
            )
            return Block(
                input_norm=norm("input_layernorm"),
                attention=Transformed(attention, norm("post_attention_layernorm")),
                post_norm=norm("pre_feedforward_layernorm"),
                mlp=Transformed(GatedMLP(blueprint, f"{name}.mlp", dims), norm("post_feedforward_layernorm")),
            )

        super().__init__(
            blueprint,
            dims,
            windows(seen, types),
            block,
            DecoderConstants(
                embedding_scale=embedding_scale(dims.hidden, blueprint.dtype),
                norm_offset=OFFSET,
                logit_softcap=settings.number_or_none("final_logit_softcapping"),
            ),
        )
        self.unread |= {name for name in blueprint.stored if name.startswith(SIGHT)}
