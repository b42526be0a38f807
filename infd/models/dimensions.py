"""The dimensions of a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from infd.models.config import Settings

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


class Dimensions(Struct, frozen=True, kw_only=True):
    """The dimensions of a decoder, read from config.json.

    inner  the feed-forward network's hidden size
    head   elements of an attention head
    tied   whether the output head shares the embedding's weight
    """

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    norm_eps: float
    activation: str
    tied: bool

    @classmethod
    def read(cls, settings: Settings) -> Dimensions:
        """Read the dimensions and check them against each other. Raises CheckpointError."""
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        kv_heads = settings.integer("num_key_value_heads", heads)
        head = settings.integer("head_dim", hidden // heads, least=2)
        if heads % kv_heads:
            raise settings.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        if head % 2:
            raise settings.error("head_dim", "an even number, since positions rotate pairs", head)
        activation = "hidden_activation" if "hidden_activation" in settings else "hidden_act"  # Gemma may contain both
        return cls(
            vocab=settings.integer("vocab_size"),
            hidden=hidden,
            inner=settings.integer("intermediate_size"),
            layers=settings.integer("num_hidden_layers", most=4096),
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            norm_eps=settings.number("rms_norm_eps", 1e-6),
            activation=settings.choice(activation, ACTIVATIONS, "silu"),
            tied=settings.boolean("tie_word_embeddings", False),
        )
