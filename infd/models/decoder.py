"""What decoder-only models have in common: sizes, the stack of blocks, and the ends of it.

A family says how a block is put together; see `llama.py` for the plainest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.models.base import PageTensor
from infd.models.layers.attention import page_groups
from infd.models.layers.embedding import Embedding, Head
from infd.models.layers.norm import RMSNorm
from infd.scheduler.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.models.base import Batch
    from infd.models.config import Settings
    from infd.models.layers.attention import Attention
    from infd.models.layers.mlp import GatedMLP
    from infd.models.parameter import Blueprint


class Sizes(Struct, frozen=True, kw_only=True):
    """The dimensions that every decoder's config.json states."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    norm_eps: float
    tied: bool

    @classmethod
    def read(cls, settings: Settings, *, head: int | None = None) -> Sizes:
        """Read and cross-check them. `head` is the family's own head size; without one it is hidden / heads."""
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        kv_heads = settings.integer("num_key_value_heads", heads)
        head = settings.integer("head_dim", head or hidden // heads, least=2)
        if heads % kv_heads:
            raise settings.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        if head % 2:
            raise settings.error("head_dim", "an even number, since positions rotate pairs", head)
        activation = settings.string("hidden_act", "silu")
        if activation != "silu":
            raise settings.error("hidden_act", "'silu', the only one computed yet", activation)
        return cls(
            vocab=settings.integer("vocab_size"),
            hidden=hidden,
            inner=settings.integer("intermediate_size"),
            layers=settings.integer("num_hidden_layers", most=4096),
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            norm_eps=settings.number("rms_norm_eps", 1e-6),
            tied=settings.boolean("tie_word_embeddings", False),
        )


class Block(Struct, frozen=True, kw_only=True):
    """One layer: attention, then the feed-forward part, each behind a norm and added to the residual stream."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Take what is still to be added to the stream, and the stream; return the same after this layer."""
        x, residual = self.input_norm.add(x, residual)
        x, residual = self.post_norm.add(self.attention(x, batch), residual)
        return self.mlp(x), residual


class Decoder:
    """Embedding, blocks, last norm, head. Implements `base.Model`."""

    def __init__(
        self,
        blueprint: Blueprint,
        sizes: Sizes,
        windows: Sequence[int | None],
        block: Callable[[str, int, int], Block],
    ) -> None:
        """Build the stack.

        windows  by layer, how many tokens a query sees; one that no sequence can outgrow counts as none
        block    makes a layer, given the prefix of its checkpoint names, its index, and the index of its page group
        """
        self.vocab_size = sizes.vocab
        self.parameters = blueprint.parameters
        self.unread = frozenset({"lm_head.weight"}) if sizes.tied else frozenset()
        self._kv_heads, self._head_size, self._dtype = sizes.kv_heads, sizes.head, blueprint.dtype
        self._windows = [None if window is None or window >= blueprint.max_len else window for window in windows]

        group_of = {layer: index for index, group in enumerate(page_groups(self._windows, 1)) for layer in group.layers}
        self._embedding = Embedding(blueprint, "model.embed_tokens", sizes.vocab, sizes.hidden)
        self._blocks = [block(f"model.layers.{layer}", layer, group_of[layer]) for layer in range(sizes.layers)]
        self._norm = RMSNorm(blueprint, "model.norm", sizes.hidden, sizes.norm_eps)
        self._head = Head(
            blueprint, "lm_head", sizes.vocab, sizes.hidden, tied=self._embedding.weight if sizes.tied else None
        )

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        return CacheLayout(page_groups(self._windows, page_tokens))

    def page_tensors(self, page_tokens: int) -> tuple[PageTensor, ...]:
        shape = (self._kv_heads, page_tokens, self._head_size)
        return PageTensor("k", shape, self._dtype), PageTensor("v", shape, self._dtype)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self._embedding(batch.tokens)
        residual: Tensor | None = None
        for block in self._blocks:
            x, residual = block(x, residual, batch)
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
