"""MPNet: BERT without token types, whose scores have biases by head and distance, and whose positions begin at 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.models.config import MPNET_FIRST
from infd.models.encoder import Encoder, PostNormBlock, prefix
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.layers.distance_bias import DistanceBias
from infd.models.layers.embedding import EncoderEmbedding
from infd.models.layers.feed_forward import FeedForward
from infd.models.layers.norm import LayerNorm
from infd.models.layers.span_attention import SpanAttention, SpanAttentionDesign, separate
from infd.models.roberta import Roberta

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings

BUCKETS: Final = 32  # relative_attention_num_buckets; transformers' code computes buckets for this number alone


class MPNet(Encoder):
    """The encoder of MPNetModel, and the heads for labels."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        dims = EncoderDimensions.read(settings)
        if (buckets := settings.integer("relative_attention_num_buckets", BUCKETS)) != BUCKETS:
            raise settings.error("relative_attention_num_buckets", str(BUCKETS), buckets)
        root = prefix(blueprint, "mpnet.", "embeddings.word_embeddings.weight")
        bias = DistanceBias(blueprint, f"{root}encoder.relative_attention_bias", dims.heads, BUCKETS)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(blueprint, f"{name}.LayerNorm", dims.hidden, dims.norm_eps)

        def block(index: int) -> PostNormBlock:
            name = f"{root}encoder.layer.{index}"
            return PostNormBlock(
                attention=SpanAttention(
                    blueprint,
                    separate(f"{name}.attention.attn", dims, parts=("q", "k", "v")),
                    f"{name}.attention.attn.o",
                    dims,
                    SpanAttentionDesign(bias=bias),
                ),
                attention_norm=norm(f"{name}.attention"),
                mlp=FeedForward(blueprint, f"{name}.intermediate.dense", f"{name}.output.dense", dims),
                mlp_norm=norm(f"{name}.output"),
            )

        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(
                blueprint,
                f"{root}embeddings.word_embeddings",
                dims,
                norm(f"{root}embeddings"),
                positions=f"{root}embeddings.position_embeddings",
                first_position=MPNET_FIRST,
            ),
            block,
            head=lambda by_token: Roberta.head(blueprint, root, dims.hidden, by_token=by_token),
            ignored=(f"{root}embeddings.position_ids", f"{root}pooler.", "lm_head."),
        )
