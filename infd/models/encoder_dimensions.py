"""The dimensions of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from infd.models.config import Settings

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


class EncoderDimensions(Struct, frozen=True, kw_only=True):
    """The dimensions of an encoder, read from config.json.

    inner      the feed-forward network's hidden size
    head       elements of an attention head
    positions  rows of the table of positions, or the longest sequence where there is none
    types      token types
    """

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    positions: int
    types: int
    norm_eps: float
    activation: str

    @classmethod
    def read(cls, settings: Settings) -> EncoderDimensions:
        """Read the dimensions and check them against each other. Raises CheckpointError.

        The keys of DistilBERT (dim) and of GPT-2 (n_embd, in NomicBERT's own files) are known beside BERT's.
        """

        def stated(usual: str, *others: str) -> str:
            return next((key for key in others if key in settings), usual)

        hidden = settings.integer(stated("hidden_size", "dim", "n_embd"))
        key = stated("num_attention_heads", "n_heads", "n_head")
        heads = settings.integer(key)
        if hidden % heads and "head_dim" not in settings:
            raise settings.error(key, f"a divisor of the hidden size ({hidden})", heads)
        kv_heads = settings.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise settings.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        activation = stated("hidden_act", "hidden_activation", "activation")
        if settings.string("activation_function", "") == "swiglu":  # NomicBERT's own name of the gated silu
            settings = settings.completed({}, {activation: "silu"})
        return cls(
            vocab=settings.integer("vocab_size"),
            hidden=hidden,
            inner=settings.integer(stated("intermediate_size", "hidden_dim", "n_inner")),
            layers=settings.integer(stated("num_hidden_layers", "n_layers", "n_layer"), most=4096),
            heads=heads,
            kv_heads=kv_heads,
            head=settings.integer("head_dim", hidden // heads),
            positions=settings.integer(stated("max_position_embeddings", "n_positions")),
            types=settings.integer("type_vocab_size", 2, least=0),
            norm_eps=settings.number(stated("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps"), 1e-12),
            activation=settings.choice(activation, ACTIVATIONS, "gelu"),
        )
