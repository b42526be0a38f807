"""BERT: the plain encoder. Other families' docstrings state their differences from BERT.

bge, gte (not ModernBERT's or its own), e5, all-MiniLM and arctic-embed (xs to l) are BERT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.models.encoder import Encoder, PostNormBlock, prefix
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.heads import Dense, Layers
from infd.models.layers.embedding import EncoderEmbedding
from infd.models.layers.feed_forward import FeedForward
from infd.models.layers.linear import Linear
from infd.models.layers.norm import LayerNorm
from infd.models.layers.span_attention import SpanAttention, SpanAttentionDesign, separate

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Bert(Encoder):
    """The encoder of BertModel, and the heads of BertForSequenceClassification and BertForTokenClassification."""

    ROOT = "bert."

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        require_plain(settings)
        dims = EncoderDimensions.read(settings)
        root = prefix(blueprint, self.ROOT, "embeddings.word_embeddings.weight")
        embeddings = f"{root}embeddings"

        width = self.width(settings, dims.hidden)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(blueprint, f"{name}.LayerNorm", dims.hidden, dims.norm_eps)

        def block(index: int) -> PostNormBlock:
            name = f"{root}encoder.layer.{index}"
            attention = SpanAttention(
                blueprint,
                separate(f"{name}.attention.self", dims),
                f"{name}.attention.output.dense",
                dims,
                SpanAttentionDesign(),
            )
            return PostNormBlock(
                attention=attention,
                attention_norm=norm(f"{name}.attention.output"),
                mlp=FeedForward(blueprint, f"{name}.intermediate.dense", f"{name}.output.dense", dims),
                mlp_norm=norm(f"{name}.output"),
            )

        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(
                blueprint,
                f"{embeddings}.word_embeddings",
                replace(dims, hidden=width),
                LayerNorm(blueprint, f"{embeddings}.LayerNorm", width, dims.norm_eps),
                positions=f"{embeddings}.position_embeddings",
                first_position=self.first_position(settings),
                types=f"{embeddings}.token_type_embeddings",
                project=None
                if width == dims.hidden
                else Linear(blueprint, {f"{root}embeddings_project": dims.hidden}, width, bias=True),
            ),
            block,
            head=lambda by_token: self.head(blueprint, root, dims.hidden, by_token=by_token),
            ignored=(
                f"{embeddings}.position_ids",
                f"{root}pooler.",
                "cls.",
                "lm_head.",
                "generator_",
                "discriminator_",
            ),
        )

    @staticmethod
    def first_position(_: Settings) -> int:
        """Return the row of a text's first token in the table of positions."""
        return 0

    @staticmethod
    def width(settings: Settings, hidden: int) -> int:  # noqa: ARG004 -- a subclass reads it
        """Return the width of the embeddings; if it is not `hidden`, embeddings_project projects them."""
        return hidden

    @staticmethod
    def head(blueprint: Blueprint, root: str, hidden: int, *, by_token: bool) -> Layers:
        """Declare the head for labels."""
        labels = len(blueprint.pooling.labels)
        classifier = Dense(blueprint, "classifier", hidden, labels)
        if by_token:
            return Layers([classifier])
        return Layers([Dense(blueprint, f"{root}pooler.dense", hidden, hidden, activation="tanh"), classifier])


def require_plain(settings: Settings) -> None:
    """Raise CheckpointError for variants of BERT that are not computed."""
    kind = settings.string("position_embedding_type", "absolute")
    if kind != "absolute":
        raise CheckpointError(f"config.json: position_embedding_type {kind!r} is not computed; only absolute is")
    for key in ("is_decoder", "add_cross_attention"):
        if settings.boolean(key, False):
            raise CheckpointError(f"config.json: {key}: a decoder of this family is not computed")
