"""The encoder-only architecture: embeddings, layers, optional last norm, head for labels. It keeps no cache.

Each family assembles its own layers; `bert.py` is the plainest example.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from msgspec import Struct
from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.kernels.families.encoder import EncoderInputs, SampledInputs
from infd.kernels.recipe import EncoderLayerRecipe
from infd.models.heads import LABEL_HEADS, denses, token_layers
from infd.models.layers.rope import lay_out
from infd.models.layers.span_attention import EncoderPass, planned
from infd.pooling import M3_FILES
from infd.scheduler.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.kernels.families.encoder import StackedEncoder, TextEmbedder
    from infd.kernels.families.stack import StepBuffers, StepMemory
    from infd.kernels.recipe import EmbeddingsRecipe
    from infd.models.base import Batch, PageTensor, PassAdapters, PoolingHead
    from infd.models.blueprint import Blueprint
    from infd.models.encoder_dimensions import EncoderDimensions
    from infd.models.heads import Layers
    from infd.models.layers.embedding import EncoderEmbedding
    from infd.models.layers.feed_forward import FeedForward, GatedFeedForward
    from infd.models.layers.norm import LayerNorm, NoNorm, RMSNorm
    from infd.models.layers.span_attention import SpanAttention
    from infd.models.parameter import Parameter
    from infd.pooling.settings import Reduction
    from infd.request import PoolTask


class EncoderBlock(Protocol):
    """One layer: x [T, hidden] to [T, hidden], or [W, hidden] if `step.sampled` is set."""

    def __call__(self, x: Tensor, step: EncoderPass) -> Tensor: ...
    def recipe(self) -> EncoderLayerRecipe: ...


class PostNormBlock(Struct, frozen=True, kw_only=True):
    """A layer that adds each sublayer's output to its input, and norms the sum (BERT)."""

    attention: SpanAttention
    attention_norm: LayerNorm
    mlp: FeedForward | GatedFeedForward
    mlp_norm: LayerNorm

    def __call__(self, x: Tensor, step: EncoderPass) -> Tensor:
        x, _ = self.attention_norm.add(self.attention(x, step), step.after(x))
        return self.mlp_norm.add(self.mlp(x, step.adapters_after), x)[0]

    def recipe(self) -> EncoderLayerRecipe:
        return _recipe(self, normed_first=False)


class PreNormBlock(Struct, frozen=True, kw_only=True):
    """A layer that norms each sublayer's input, and adds its output to the sum before the norm (ModernBERT)."""

    attention_norm: LayerNorm | RMSNorm | NoNorm
    attention: SpanAttention
    mlp_norm: LayerNorm | RMSNorm
    mlp: FeedForward | GatedFeedForward

    def __call__(self, x: Tensor, step: EncoderPass) -> Tensor:
        normed, _ = self.attention_norm.add(x, None)
        normed, x = self.mlp_norm.add(self.attention(normed, step), step.after(x))
        return x + self.mlp(normed, step.adapters_after)

    def recipe(self) -> EncoderLayerRecipe:
        return _recipe(self, normed_first=True)


def _recipe(block: PostNormBlock | PreNormBlock, *, normed_first: bool) -> EncoderLayerRecipe:
    attention, mlp = block.attention, block.mlp.recipe()
    return EncoderLayerRecipe(
        attention_norm=block.attention_norm.recipe(),
        mlp_norm=block.mlp_norm.recipe(),
        normed_first=normed_first,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_size=attention.size,
        qkv=attention.qkv.recipe(),
        rope=None if attention.design.rope is None else attention.design.rope.table,
        reach=attention.design.reach,
        bias=attention.design.bias,
        scale=attention.scale,
        output=attention.output.recipe(),
        up=mlp.up,
        gated=mlp.gated,
        activation=mlp.activation,
        down=mlp.down,
    )


class Ignored:
    """Names of checkpoint tensors that no parameter reads: those that begin with one of `prefixes`."""

    def __init__(self, *prefixes: str) -> None:
        self._prefixes = prefixes

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.startswith(self._prefixes)


class Encoder:
    """Embeddings, blocks, last norm, head for labels. Implements `base.Model`."""

    generates = False
    skips_unsampled = True
    experts = None
    logits_dtype = torch.float32

    def __init__(
        self,
        blueprint: Blueprint,
        dims: EncoderDimensions,
        embedding: EncoderEmbedding,
        block: Callable[[int], EncoderBlock],
        *,
        norm: Callable[[], LayerNorm | RMSNorm] | None = None,
        head: Callable[[bool], Layers] | None = None,
        ignored: Sequence[str] = (),
    ) -> None:
        """Declare all weights on `blueprint`. Raises CheckpointError.

        block    builds a layer from its index
        norm     builds the norm of the last layer's output
        head     builds the head for labels, from whether each token has labels
        ignored  prefixes of the names of checkpoint tensors that are not read
        """
        self.vocab_size = dims.vocab
        self.parameters = blueprint.parameters
        self.targets = blueprint.targets
        self.cache_scales: dict[int, Parameter] = {}
        self._attention, self._stack = blueprint.ops.span_attention, blueprint.ops.encoder
        self._embedding = embedding
        self._blocks = [block(index) for index in range(dims.layers)]
        self._norm = None if norm is None else norm()
        tasks = blueprint.pooling.tasks
        by_token = "token_classify" in tasks and blueprint.pooling.token_weight is None
        self._labels = head(by_token) if head is not None and (by_token or "classify" in tasks) else None
        self.unread = Ignored(*ignored, *M3_FILES.values(), *(LABEL_HEADS if self._labels is None else ()))
        self._denses = denses(blueprint)
        self._by_token = token_layers(blueprint)
        if lay_out(blueprint.ropes).several:
            raise CheckpointError(
                "config.json: rope_parameters: angles that depend on a text's length are not computed"
            )
        self.least_rows = blueprint.least_rows()

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        return CacheLayout(groups=(), divisible=False)

    def page_tensors(self, page_tokens: int) -> tuple[PageTensor, ...]:
        return ()

    def forward(self, batch: Batch) -> Tensor:
        batch = planned(batch, self._attention)
        tokens, positions, plan, sampled = batch.tokens, batch.positions, batch.spans, batch.sampled
        assert plan is not None
        if batch.adapters is None and self.stacked is not None:
            # The call computes the embeddings too, if it was built with their recipe.
            given = None if self._recipe else self._embedding(tokens, positions, batch.types, None)
            last = None
            if sampled is not None:
                assert sampled.spans is not None
                last = SampledInputs(sampled.tokens, sampled.spans)
            x = self.stacked(EncoderInputs(tokens, positions, batch.types, last), given, plan, batch.beat)
        else:
            x = self._embedding(tokens, positions, batch.types, batch.adapters)
            whole = EncoderPass(plan, positions, batch.adapters)
            for block in self._blocks:
                batch.beat()
                x = block(x, whole if block is not self._blocks[-1] else replace(whole, sampled=sampled))
        return x if self._norm is None else self._norm.add(x, None)[0]

    @cached_property
    def _recipe(self) -> EmbeddingsRecipe | None:
        return self._embedding.recipe()

    @cached_property
    def stacked(self) -> StackedEncoder | None:
        """All layers as one fused call, which supports no adapters; None if no kernel fuses these layers."""
        return self._stack.build([block.recipe() for block in self._blocks], self._recipe)

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        raise NotImplementedError("encoders have no logits of tokens")

    def fused(self, memory: StepMemory, buffers: StepBuffers) -> None:
        return None

    def embedder(self, reduction: Reduction, most: int) -> TextEmbedder | None:
        if self.stacked is None or self._norm is not None or self.pooling_head("embed") is not None:
            return None
        return self.stacked.embedder(reduction, most)

    def pooling_head(self, task: PoolTask) -> PoolingHead | None:
        if task in self._by_token:
            return self._by_token[task]
        return self._labels if task in ("classify", "token_classify") else self._denses if task == "embed" else None


def prefix(blueprint: Blueprint, root: str, tensor: str) -> str:
    """Return `root` if the checkpoint's names have this prefix, else "". tensor: a name without the prefix."""
    return root if f"{root}{tensor}" in blueprint.stored else ""
