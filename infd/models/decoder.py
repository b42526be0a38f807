"""What decoder-only models have in common: the stack of blocks, and the ends of it.

A family says how a block is put together; see `llama.py` for the plainest one.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from infd.kernels.families.attention import FLOAT8
from infd.kernels.recipe import LayerRecipe
from infd.models.base import PageTensor
from infd.models.layers import cache_scales
from infd.models.layers.attention import page_groups
from infd.models.layers.embedding import Embedding, Head
from infd.models.layers.norm import RMSNorm
from infd.models.layers.rope import by_prompt, lay_out
from infd.scheduler.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.stack import Stacked
    from infd.kernels.recipe import AttentionRecipe, GatedRecipe
    from infd.models.base import Adapted, Batch
    from infd.models.layers.branch import Branch
    from infd.models.layers.norm import NoNorm
    from infd.models.parameter import Blueprint, Parameter
    from infd.models.sizes import Sizes

# Where a checkpoint keeps the decoder: as usual, beside other towers (before transformers 5, and since), saved alone.
ROOTS = ("model.", "language_model.model.", "model.language_model.", "")
HEADS = ("lm_head", "language_model.lm_head")


class Block(Struct, frozen=True, kw_only=True):
    """One layer: attention, then the feed-forward part, each behind a norm and added to the residual stream."""

    input_norm: RMSNorm | NoNorm
    attention: Branch[AttentionRecipe, Batch]
    post_norm: RMSNorm | NoNorm
    mlp: Branch[GatedRecipe, Adapted | None]

    def recipe(self) -> LayerRecipe | None:
        """Return what the layer computes, told as data, or None where there are no words for it."""
        attention, mlp = self.attention.recipe(), self.mlp.recipe()
        if attention is None or mlp is None:
            return None
        return LayerRecipe(
            input_norm=self.input_norm.recipe(), attention=attention, post_norm=self.post_norm.recipe(), mlp=mlp
        )

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Take what is still to be added to the stream, and the stream; return the same after this layer.

        Where some tokens are wanted, the same of these alone: so no layer but the last is told of them.
        """
        x, residual = self.input_norm.add(x, residual)
        x, adapters = self.attention(x, batch), batch.adapters
        if (wanted := batch.wanted) is not None:
            residual, adapters = residual[wanted.tokens], wanted.adapters
        x, residual = self.post_norm.add(x, residual)
        return self.mlp(x, adapters), residual


class Decoder:
    """Embedding, blocks, last norm, head. Implements `base.Model`."""

    narrows = True

    def __init__(
        self,
        blueprint: Blueprint,
        sizes: Sizes,
        windows: Sequence[int | None],
        block: Callable[[str, int, int], Block],
        *,
        embedding_scale: float = 1.0,
        norm_offset: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        """Build the stack.

        windows  by layer, how many tokens a query sees; one that no sequence can outgrow counts as none
        block    makes a layer, given the prefix of its checkpoint names, its index, and the index of its page group

        The others are what a family does to its embeddings, its last norm's weight, and its logits.
        """
        root = next((root for root in ROOTS if f"{root}embed_tokens.weight" in blueprint.stored), ROOTS[0])
        head = next((head for head in HEADS if f"{head}.weight" in blueprint.stored), HEADS[0])
        self.vocab_size = sizes.vocab
        self.parameters = blueprint.parameters
        self.targets = blueprint.targets
        self.unread = frozenset({f"{head}.weight"}) if sizes.tied else frozenset()
        self._stack = blueprint.ops.stack
        self._ropes = blueprint.ropes
        self._regimes = lay_out(blueprint.ropes)
        self._kv_heads, self._row = sizes.kv_heads, blueprint.ops.attention.row(sizes.head, blueprint.dtype)
        self.cache_scales: dict[int, Parameter] = {}
        unused: set[str] = set()
        for layer in range(sizes.layers):
            attention = f"{root}layers.{layer}.self_attn"
            names = cache_scales.stored_names(blueprint, attention)
            if names and self._row[1] is FLOAT8:
                self.cache_scales[layer] = cache_scales.declare(blueprint, names, sizes.kv_heads)
            else:
                unused.update(names)
            unused |= cache_scales.unused_names(blueprint, attention)
        self.unread |= unused
        self._windows = [None if window is None or window >= blueprint.max_len else window for window in windows]

        group_of = {layer: index for index, group in enumerate(page_groups(self._windows, 1)) for layer in group.layers}
        self._embedding = Embedding(blueprint, f"{root}embed_tokens", sizes.vocab, sizes.hidden, scale=embedding_scale)
        self._blocks = [block(f"{root}layers.{layer}", layer, group_of[layer]) for layer in range(sizes.layers)]
        self._norm = RMSNorm(blueprint, f"{root}norm", sizes.hidden, sizes.norm_eps, offset=norm_offset)
        self._head = Head(
            blueprint,
            head,
            sizes.vocab,
            sizes.hidden,
            tied=self._embedding.weight if sizes.tied else None,
            scale=logit_scale,
            softcap=logit_softcap,
        )
        self.least_rows = blueprint.least_rows()

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        return CacheLayout(page_groups(self._windows, page_tokens), regimes=self._regimes)

    def page_tensors(self, page_tokens: int) -> tuple[PageTensor, ...]:
        size, dtype = self._row
        shape = (self._kv_heads, page_tokens, size)
        return PageTensor("k", shape, dtype), PageTensor("v", shape, dtype)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self._embedding(batch.tokens, batch.adapters)
        if batch.prompts is not None:
            batch = by_prompt(self._ropes, batch)
        elif self._stacked is not None and batch.adapters is None:
            return self._norm.add(*self._stacked(x, batch))[0]
        residual: Tensor | None = None
        *before, last = self._blocks
        whole = batch if batch.wanted is None else replace(batch, wanted=None)
        for block in before:
            batch.beat()
            x, residual = block(x, residual, whole)
        batch.beat()
        x, residual = last(x, residual, batch)
        return self._norm.add(x, residual)[0]

    @cached_property
    def _stacked(self) -> Stacked | None:
        """All blocks as one, where kernels can compute them so.

        Not with adapters, which add between products, nor with tables of angles that are one step's.
        """
        recipes = [block.recipe() for block in self._blocks]
        told = [recipe for recipe in recipes if recipe is not None]
        return self._stack.build(told) if len(told) == len(recipes) else None

    def logits(self, hidden: Tensor, adapters: Adapted | None = None) -> Tensor:
        return self._head(hidden, adapters)
