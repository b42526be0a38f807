"""NomicBERT: BERT with rope instead of positions, gated networks, and without biases of products."""

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

# Settings of the authors' own code, and the values that are computed.
COMPUTED = {
    "prenorm": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_interleaved": False,
    "parallel_block": False,
}


class NomicBert(Encoder):
    """The encoder of NomicBertModel, and the heads for labels. config.json has GPT-2's keys (n_embd), or BERT's."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        for key, value in COMPUTED.items():
            if settings.boolean(key, value) is not value:
                raise CheckpointError(f"config.json: {key}: only {str(value).lower()} is computed")
        if settings.integer("num_experts", 0, least=0) or settings.integer("moe_every_n_layers", 0, least=0):
            raise CheckpointError("config.json: num_experts: experts of this family are not computed")
        dims = EncoderDimensions.read(settings)
        root = prefix(blueprint, "nomic_bert.", "embeddings.word_embeddings.weight")
        theta = settings.number("rotary_emb_base", 1000.0)
        rope = blueprint.rope(rope_parameters(settings.over({"rope_theta": theta})), dims.head)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(blueprint, name, dims.hidden, dims.norm_eps)

        def block(index: int) -> PostNormBlock:
            name = f"{root}encoder.layers.{index}"
            return PostNormBlock(
                attention=SpanAttention(
                    blueprint,
                    {f"{name}.attn.Wqkv": 3 * dims.heads * dims.head},
                    f"{name}.attn.out_proj",
                    dims,
                    SpanAttentionDesign(rope=rope),
                    bias=False,
                ),
                attention_norm=norm(f"{name}.norm1"),
                mlp=GatedFeedForward(
                    blueprint,
                    {f"{name}.mlp.fc12": dims.inner, f"{name}.mlp.fc11": dims.inner},
                    f"{name}.mlp.fc2",
                    dims,
                ),
                mlp_norm=norm(f"{name}.norm2"),
            )

        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(
                blueprint,
                f"{root}embeddings.word_embeddings",
                dims,
                norm(f"{root}emb_ln"),
                types=f"{root}embeddings.token_type_embeddings",
            ),
            block,
            head=lambda by_token: Bert.head(blueprint, root, dims.hidden, by_token=by_token),
            ignored=(f"{root}pooler.", "cls."),
        )
