"""The decoder-only architecture: embedding, layers, last norm, head.

Each model family assembles its own layers; `llama.py` is the plainest example.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from msgspec import Struct
from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.kernels.families.attention import FLOAT8
from infd.kernels.families.span_attention import Reach
from infd.kernels.recipe import DecoderRecipe, LayerRecipe
from infd.models.base import PageTensor
from infd.models.heads import LABEL_HEADS, TokenLogits, pooling_layers
from infd.models.layers import cache_scales
from infd.models.layers.attention import LayerIndex, extent, page_groups
from infd.models.layers.embedding import Embedding, Head
from infd.models.layers.norm import LayerNorm, RMSNorm
from infd.models.layers.rope import by_prompt, lay_out
from infd.models.layers.span_attention import planned
from infd.request import ExpertSizes
from infd.scheduler.layout import CacheLayout, Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.stack import FusedDecoder, Stacked, StepBuffers, StepMemory
    from infd.kernels.recipe import AttentionRecipe, ExpertsRecipe, GatedRecipe
    from infd.models.base import Batch, PassAdapters, PoolingHead
    from infd.models.blueprint import Blueprint
    from infd.models.dimensions import Dimensions
    from infd.models.layers.norm import NoNorm
    from infd.models.layers.sublayer import Sublayer
    from infd.models.parameter import Matrix, Parameter
    from infd.pooling.settings import Reduction
    from infd.request import PoolTask

# Prefixes of the decoder's weights: in text-only models; in multimodal models saved before transformers 5; in
# multimodal models saved by transformers 5; in decoders saved without a head.
ROOTS = ("model.", "language_model.model.", "model.language_model.", "")
HEADS = ("lm_head", "language_model.lm_head")


class Block(Struct, frozen=True, kw_only=True):
    """One layer: attention, then the feed-forward network, each preceded by a norm and added to the residual stream."""

    input_norm: RMSNorm | LayerNorm | NoNorm
    attention: Sublayer[AttentionRecipe]
    post_norm: RMSNorm | LayerNorm | NoNorm
    mlp: Sublayer[GatedRecipe | ExpertsRecipe]

    def recipe(self) -> LayerRecipe | None:
        """Return the layer as a LayerRecipe, or None if a recipe cannot express it."""
        attention, mlp = self.attention.recipe(), self.mlp.recipe()
        if attention is None or mlp is None:
            return None
        return LayerRecipe(
            input_norm=self.input_norm.recipe(), attention=attention, post_norm=self.post_norm.recipe(), mlp=mlp
        )

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the layer. Return (the layer's last addition to the residual stream, the stream without this addition).

        x         [T, hidden]: the pending addition of the previous layer; for the first layer, the embeddings
        residual  [T, hidden]: the stream without x; None: the first layer starts the stream with x

        If `batch.sampled` is set (last layer only), both results are [W, hidden]: the sampled rows.
        """
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, batch)
        if (sampled := batch.sampled) is not None:
            residual, batch = residual[sampled.tokens], replace(batch, adapters=sampled.adapters)
        x, residual = self.post_norm.add(x, residual)
        return self.mlp(x, batch), residual


class DecoderConstants(NamedTuple):
    """The constants of a decoder outside its layers.

    embedding_scale  multiplies the embeddings
    norm_offset      added to the last norm's weight
    logit_scale      multiplies the logits
    logit_softcap    bounds the scaled logits: softcap * tanh(logit / softcap)
    head_bias        whether the head has a bias
    layer_norm       whether the last norm is a LayerNorm
    """

    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    layer_norm: bool = False


PLAIN: Final = DecoderConstants()


class Decoder:
    """Embedding, blocks, last norm, head. Implements `base.Model`."""

    skips_unsampled = True

    def __init__(
        self,
        blueprint: Blueprint,
        dims: Dimensions,
        windows: Sequence[int | Chunk | None],
        block: Callable[[str, LayerIndex], Block],
        constants: DecoderConstants = PLAIN,
    ) -> None:
        """Declare all weights on `blueprint`.

        windows  by layer, the attention window in tokens, or chunks; None, or a range of at least max_len tokens: full
                 attention. Without causality a window is the number of tokens that are seen on either side
        block    builds a layer from the prefix of its checkpoint names, and its indices

        Raises CheckpointError.
        """
        root = next((root for root in ROOTS if f"{root}embed_tokens.weight" in blueprint.stored), ROOTS[0])
        head = next((head for head in HEADS if f"{head}.weight" in blueprint.stored), HEADS[0])
        self.vocab_size = dims.vocab
        self.parameters = blueprint.parameters
        self.targets = blueprint.targets
        self.unread = frozenset({f"{head}.weight"}) if dims.tied else frozenset()
        self._stack = blueprint.ops.stack
        self._ropes = blueprint.ropes
        self._regimes = lay_out(blueprint.ropes)
        self._causal = blueprint.pooling.causal
        if self._causal:
            self._kv_heads, self._row = dims.kv_heads, blueprint.ops.attention.row(dims.head, blueprint.dtype)
        else:
            self._span_attention = blueprint.ops.span_attention
        self.cache_scales: dict[int, Parameter] = {}
        unused: set[str] = set()
        for layer in range(dims.layers):
            attention = f"{root}layers.{layer}.self_attn"
            names = cache_scales.stored_names(blueprint, attention)
            if names and self._causal and self._row[1] is FLOAT8:
                self.cache_scales[layer] = cache_scales.declare(blueprint, names, dims.kv_heads)
            else:
                unused.update(names)
            unused |= cache_scales.unused_names(blueprint, attention)
        self.unread |= unused
        self._windows = [None if not 0 < extent(each) < blueprint.max_len else each for each in windows]

        group_of = {layer: index for index, group in enumerate(page_groups(self._windows, 1)) for layer in group.layers}
        self._embedding = Embedding(blueprint, f"{root}embed_tokens", dims, scale=constants.embedding_scale)
        self._blocks: list[Block] = []
        mixtures = 0
        for layer in range(dims.layers):
            mixtures = len(blueprint.mixtures)
            index = LayerIndex(layer, group_of[layer], self._reach(layer))
            self._blocks.append(block(f"{root}layers.{layer}", index))
        self._ends_in_experts = len(blueprint.mixtures) > mixtures
        self.experts = _expert_sizes(blueprint.mixtures)
        self._norm: RMSNorm | LayerNorm = (
            LayerNorm(blueprint, f"{root}norm", dims.hidden, dims.norm_eps)
            if constants.layer_norm
            else RMSNorm(blueprint, f"{root}norm", dims.hidden, dims.norm_eps, offset=constants.norm_offset)
        )
        tied = self._embedding.weight if dims.tied else None
        self.generates = not blueprint.pooling.tasks
        if self.generates:
            self._head = Head(
                blueprint,
                head,
                dims,
                tied=tied,
                scale=constants.logit_scale,
                softcap=constants.logit_softcap,
                bias=constants.head_bias,
            )
        else:
            self.unread |= {f"{head}.weight", f"{head}.bias"}
            if not blueprint.pooling.labels:
                self.unread |= {name for name in blueprint.stored if name.startswith(LABEL_HEADS)}
        self._pooling_head = None if self.generates else _pooling_head(blueprint, head, dims, tied, constants)
        self.logits_dtype = self._head.dtype if self.generates else torch.float32
        self.least_rows = blueprint.least_rows()

    def _reach(self, layer: int) -> Reach | None:
        """Return the keys that a layer's queries see without causality; None: attention is causal."""
        if self._causal:
            return None
        if isinstance(window := self._windows[layer], Chunk):
            raise CheckpointError("attention confined to chunks is not computed without causality")
        return Reach(window, window)

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        if not self._causal:
            return CacheLayout((), divisible=False, regimes=self._regimes)
        for each in self._windows:
            if isinstance(each, Chunk) and each.tokens % page_tokens:
                raise CheckpointError(
                    f"attention is confined to chunks of {each.tokens} tokens, which are not whole pages of"
                    f" {page_tokens} tokens: choose another cache.page_tokens"
                )
        return CacheLayout(page_groups(self._windows, page_tokens), regimes=self._regimes)

    def page_tensors(self, page_tokens: int) -> tuple[PageTensor, ...]:
        if not self._causal:
            return ()
        size, dtype = self._row
        shape = (self._kv_heads, page_tokens, size)
        return PageTensor("k", shape, dtype), PageTensor("v", shape, dtype)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self._embedding(batch.tokens, batch.adapters)
        if not self._causal:
            batch = planned(batch, self._span_attention)
        if batch.prompts is not None:
            batch = by_prompt(self._ropes, batch)
        elif self.stacked is not None and batch.adapters is None:
            added, stream = self.stacked(x, batch)
            self._unwrite_padding(batch)
            return self._norm.add(added, stream)[0]
        residual: Tensor | None = None
        *before, last = self._blocks
        whole = batch if batch.sampled is None else replace(batch, sampled=None)
        for block in before:
            batch.beat()
            x, residual = block(x, residual, whole)
        batch.beat()
        x, residual = last(x, residual, batch)
        self._unwrite_padding(batch)
        return self._norm.add(x, residual)[0]

    def _unwrite_padding(self, batch: Batch) -> None:
        """Take back the experts that the last layer wrote for repeated sampled tokens."""
        sampled, routes = batch.sampled, batch.routes
        if routes is not None and sampled is not None and sampled.padding and self._ends_in_experts:
            routes[len(sampled.tokens) - sampled.padding : len(sampled.tokens), -1] = -1

    @cached_property
    def stacked(self) -> Stacked | None:
        """All layers as one fused call, or None if no kernel fuses these layers.

        The call supports neither adapters, because it adds nothing between its matrix products, nor `batch.angles`.
        """
        recipes = [block.recipe() for block in self._blocks]
        complete = [recipe for recipe in recipes if recipe is not None]
        return self._stack.build(complete) if len(complete) == len(recipes) else None

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        return self._head(hidden, adapters)

    def fused(self, memory: StepMemory, buffers: StepBuffers) -> FusedDecoder | None:
        head = self._head.recipe()
        if self.stacked is None or head is None:
            return None
        ends = DecoderRecipe(self._embedding.recipe(), self._norm.recipe(), head)
        return self._stack.decoder(self.stacked, ends, memory, buffers)

    def embedder(self, reduction: Reduction, most: int) -> None:
        return None

    def pooling_head(self, task: PoolTask) -> PoolingHead | None:
        return None if task == "token_embed" else self._pooling_head


def _expert_sizes(mixtures: Sequence[tuple[int, int]]) -> ExpertSizes | None:
    assert len(set(mixtures)) < 2, "layers have different numbers of experts"
    return ExpertSizes(len(mixtures), *mixtures[0]) if mixtures else None


def _pooling_head(
    blueprint: Blueprint, name: str, dims: Dimensions, tied: Matrix | None, constants: DecoderConstants
) -> PoolingHead | None:
    """Declare the layers after pooling, see `pooling_layers`; or the head of labels that are tokens.

    name, tied  of the language model head, of which a head for labels may be a part
    """
    pooling = blueprint.pooling
    if pooling.label_tokens:
        scale, softcap = constants.logit_scale, constants.logit_softcap
        return TokenLogits(blueprint, name, dims, tied=tied, scale=scale, softcap=softcap)
    return pooling_layers(blueprint, dims.hidden)
