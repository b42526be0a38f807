"""EuroBERT: Llama's layers without causality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.config import rope_parameters
from infd.models.encoder import Encoder, PreNormBlock, prefix
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.heads import Dense, Layers
from infd.models.layers.embedding import EncoderEmbedding
from infd.models.layers.feed_forward import GatedFeedForward
from infd.models.layers.norm import RMSNorm
from infd.models.layers.span_attention import SpanAttention, SpanAttentionDesign, separate

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class EuroBert(Encoder):
    """The encoder of EuroBertModel, and the heads for labels; pooling/reading.py refuses classifier_pooling "late"."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        dims = EncoderDimensions.read(settings)
        root = prefix(blueprint, "model.", "embed_tokens.weight")
        rope = blueprint.rope(rope_parameters(settings), dims.head)
        bias, mlp_bias = settings.boolean("attention_bias", False), settings.boolean("mlp_bias", False)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(blueprint, name, dims.hidden, dims.norm_eps)

        def block(index: int) -> PreNormBlock:
            name = f"{root}layers.{index}"
            return PreNormBlock(
                attention_norm=norm(f"{name}.input_layernorm"),
                attention=SpanAttention(
                    blueprint,
                    separate(f"{name}.self_attn", dims, parts=("q_proj", "k_proj", "v_proj")),
                    f"{name}.self_attn.o_proj",
                    dims,
                    SpanAttentionDesign(rope=rope),
                    bias=bias,
                ),
                mlp_norm=norm(f"{name}.post_attention_layernorm"),
                mlp=GatedFeedForward(
                    blueprint,
                    {f"{name}.mlp.{part}": dims.inner for part in ("gate_proj", "up_proj")},
                    f"{name}.mlp.down_proj",
                    dims,
                    bias=mlp_bias,
                ),
            )

        def head(by_token: bool) -> Layers:
            classifier = Dense(blueprint, "classifier", dims.hidden, len(blueprint.pooling.labels))
            if by_token:
                return Layers([classifier])
            return Layers([Dense(blueprint, "dense", dims.hidden, dims.hidden, activation="gelu"), classifier])

        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(blueprint, f"{root}embed_tokens", dims, None),
            block,
            norm=lambda: norm(f"{root}norm"),
            head=head,
            ignored=("lm_head.",),
        )
