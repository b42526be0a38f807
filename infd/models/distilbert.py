"""DistilBERT: BERT with half the layers, without token types, and with other names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.encoder import Encoder, PostNormBlock, prefix
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.heads import Dense, Layers
from infd.models.layers.embedding import EncoderEmbedding
from infd.models.layers.feed_forward import FeedForward
from infd.models.layers.norm import LayerNorm
from infd.models.layers.span_attention import SpanAttention, SpanAttentionDesign, separate

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class DistilBert(Encoder):
    """The encoder of DistilBertModel, and the heads for labels."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        dims = EncoderDimensions.read(settings)
        root = prefix(blueprint, "distilbert.", "embeddings.word_embeddings.weight")

        def norm(name: str) -> LayerNorm:
            return LayerNorm(blueprint, name, dims.hidden, dims.norm_eps)

        def block(index: int) -> PostNormBlock:
            name = f"{root}transformer.layer.{index}"
            return PostNormBlock(
                attention=SpanAttention(
                    blueprint,
                    separate(f"{name}.attention", dims, parts=("q_lin", "k_lin", "v_lin")),
                    f"{name}.attention.out_lin",
                    dims,
                    SpanAttentionDesign(),
                ),
                attention_norm=norm(f"{name}.sa_layer_norm"),
                mlp=FeedForward(blueprint, f"{name}.ffn.lin1", f"{name}.ffn.lin2", dims),
                mlp_norm=norm(f"{name}.output_layer_norm"),
            )

        def head(by_token: bool) -> Layers:
            classifier = Dense(blueprint, "classifier", dims.hidden, len(blueprint.pooling.labels))
            if by_token:
                return Layers([classifier])
            return Layers([Dense(blueprint, "pre_classifier", dims.hidden, dims.hidden, activation="relu"), classifier])

        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(
                blueprint,
                f"{root}embeddings.word_embeddings",
                dims,
                norm(f"{root}embeddings.LayerNorm"),
                positions=f"{root}embeddings.position_embeddings",
            ),
            block,
            head=head,
            ignored=(f"{root}embeddings.position_ids", "vocab_"),
        )
