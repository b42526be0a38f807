"""GTE (gte-multilingual, gte-base-en-v1.5, arctic-embed-m-v2): BERT with rope and gated networks.

Its authors call the architecture New. GTE's names are transformers'; the tensors have the same names in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.errors import CheckpointError
from infd.models.bert import Bert
from infd.models.config import rope_parameters
from infd.models.encoder import Encoder, PostNormBlock, prefix
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.layers.embedding import EncoderEmbedding
from infd.models.layers.feed_forward import GatedFeedForward
from infd.models.layers.norm import LayerNorm
from infd.models.layers.span_attention import SpanAttention, SpanAttentionDesign

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Gte(Encoder):
    """The encoder of GteModel and NewModel, and the heads for labels."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        for key, computed in {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}.items():
            if (found := settings.string(key, computed)) != computed:
                raise CheckpointError(f"config.json: {key} {found!r} is not computed; only {computed} is")
        if settings.boolean("logn_attention_scale", False):
            raise CheckpointError("config.json: logn_attention_scale is not computed")
        dims = EncoderDimensions.read(settings)
        roots = [prefix(blueprint, root, "embeddings.word_embeddings.weight") for root in ("gte.", "new.")]
        root = max(roots, key=len)
        theta = settings.number("rope_theta", 160_000.0)
        rope = blueprint.rope(rope_parameters(settings.over({"rope_theta": theta})), dims.head)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(blueprint, name, dims.hidden, dims.norm_eps)

        def block(index: int) -> PostNormBlock:
            name = f"{root}encoder.layer.{index}"
            return PostNormBlock(
                attention=SpanAttention(
                    blueprint,
                    {f"{name}.attention.qkv_proj": 3 * dims.heads * dims.head},
                    f"{name}.attention.o_proj",
                    dims,
                    SpanAttentionDesign(rope=rope),
                ),
                attention_norm=norm(f"{name}.attn_ln"),
                mlp=GatedFeedForward(
                    blueprint,
                    {f"{name}.mlp.up_gate_proj": 2 * dims.inner},
                    f"{name}.mlp.down_proj",
                    dims,
                    up_first=True,
                    down_bias=True,
                ),
                mlp_norm=norm(f"{name}.mlp_ln"),
            )

        types = settings.integer("type_vocab_size", 0, least=0)
        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(
                blueprint,
                f"{root}embeddings.word_embeddings",
                dims,
                norm(f"{root}embeddings.LayerNorm"),
                types=f"{root}embeddings.token_type_embeddings" if types else "",
            ),
            block,
            head=lambda by_token: Bert.head(blueprint, root, dims.hidden, by_token=by_token),
            ignored=(f"{root}pooler.", f"{root}embeddings.position_ids", "lm_head."),
        )
