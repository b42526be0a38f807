"""ModernBERT: norms before sublayers, rope, gated networks; of three layers, two see a window on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.families.span_attention import WHOLE, Reach
from infd.models.config import rope_parameters
from infd.models.encoder import Encoder, PreNormBlock, prefix
from infd.models.encoder_dimensions import EncoderDimensions
from infd.models.heads import Dense, Layers, Normed
from infd.models.layers.embedding import EncoderEmbedding
from infd.models.layers.feed_forward import GatedFeedForward
from infd.models.layers.norm import LayerNorm, NoNorm
from infd.models.layers.span_attention import SpanAttention, SpanAttentionDesign
from infd.models.windows import FULL, SLIDING, layer_types

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings

# Keys of the theta of each type of layer in files from before transformers 5, and its default.
THETA = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


class ModernBert(Encoder):
    """The encoder of ModernBertModel, and the heads for labels."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        """Declare the model's weights. Raises CheckpointError."""
        dims = EncoderDimensions.read(settings)
        root = prefix(blueprint, "model.", "embeddings.tok_embeddings.weight")
        every = settings.integer("global_attn_every_n_layers", 3)
        types = layer_types(settings, [SLIDING if index % every else FULL for index in range(dims.layers)])
        beside = settings.integer("local_attention", 128) // 2
        designs = {
            kind: SpanAttentionDesign(
                rope=blueprint.rope(_rope(settings, kind), dims.head),
                reach=WHOLE if kind == FULL else Reach(beside, beside),
            )
            for kind in sorted(set(types))
        }
        norm_bias = settings.boolean("norm_bias", False)
        bias, mlp_bias = settings.boolean("attention_bias", False), settings.boolean("mlp_bias", False)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(blueprint, name, dims.hidden, dims.norm_eps, bias=norm_bias)

        def block(index: int) -> PreNormBlock:
            name = f"{root}layers.{index}"
            return PreNormBlock(
                attention_norm=norm(f"{name}.attn_norm") if index else NoNorm(),
                attention=SpanAttention(
                    blueprint,
                    {f"{name}.attn.Wqkv": 3 * dims.hidden},
                    f"{name}.attn.Wo",
                    dims,
                    designs[types[index]],
                    bias=bias,
                ),
                mlp_norm=norm(f"{name}.mlp_norm"),
                mlp=GatedFeedForward(
                    blueprint, {f"{name}.mlp.Wi": 2 * dims.inner}, f"{name}.mlp.Wo", dims, bias=mlp_bias
                ),
            )

        def head(_: bool) -> Layers:
            activation = settings.string("classifier_activation", "gelu")
            biased = settings.boolean("classifier_bias", False)
            return Layers(
                [
                    Dense(blueprint, "head.dense", dims.hidden, dims.hidden, activation=activation, bias=biased),
                    Normed(blueprint, "head.norm", dims.hidden, dims.norm_eps, bias=norm_bias),
                    Dense(blueprint, "classifier", dims.hidden, len(blueprint.pooling.labels)),
                ]
            )

        super().__init__(
            blueprint,
            dims,
            EncoderEmbedding(blueprint, f"{root}embeddings.tok_embeddings", dims, norm(f"{root}embeddings.norm")),
            block,
            norm=lambda: norm(f"{root}final_norm"),
            head=head,
            ignored=("head.", "decoder."),
        )


def _rope(settings: Settings, kind: str) -> Settings:
    """Return the rotary settings of a type of layer."""
    key, usual = THETA[kind]
    return rope_parameters(settings.over({"rope_theta": settings.number(key, usual)}), kind)
