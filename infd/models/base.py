"""The `Model` protocol, and `Batch`, the input of one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from msgspec import Struct
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from infd.kernels.families.adapters import LowRank
    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.families.encoder import TextEmbedder
    from infd.kernels.families.span_attention import SpanPlan
    from infd.kernels.families.stack import FusedDecoder, StepBuffers, StepMemory
    from infd.models.parameter import Parameter, Target
    from infd.pooling.settings import Reduction
    from infd.request import ExpertSizes, PoolTask
    from infd.scheduler.layout import CacheLayout


class PassAdapters(Protocol):
    """The LoRA adapters of a pass: each token has its own adapter, or none.

    In a pass in which no token has an adapter, Batch.adapters is None.
    """

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        """Add x A^T B^T to y [T, outputs], in place. A and B are the factors for `target` of each row's adapter.

        x  [T, inputs]
        """

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        """Add A[token] B^T to y [T, outputs], in place. A and B are each row's factors for the table `target`.

        tokens  [T] int64
        """

    def replace(self, y: Tensor, x: Tensor, target: Target) -> None:
        """Compute, in place, the rows of y [T, outputs] whose adapters have a weight of their own for `target`.

        x  [T, inputs] float32
        """

    def groups(self, target: Target) -> Sequence[tuple[Tensor, LowRank]]:
        """Return the rows [n] int64, ascending, of each adapter that changes `target`, and its factors."""


def _unwatched() -> None:
    """No-op, for a pass whose progress is not counted."""


class Batch(Struct, kw_only=True):
    """The input of one forward pass: T tokens, packed span after span, including padding to at least least_rows.

    `runner/cuda_graphs/padded_step.py` builds the batches of padded decoding steps, `runner/batch.py` all others.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: rows of the rotary tables
    attention: Sequence[AttentionPlan]  # by page group
    cache: Sequence[KeyValuePages]  # by layer
    beat: Callable[[], None] = _unwatched  # called before each layer: counts progress, and may raise to abort the pass
    adapters: PassAdapters | None = None
    sampled: SampledBatch | None = None  # None: the model returns the hidden states of all tokens
    # [T] int64: the length of each token's prompt if the token's rotary angles depend on the length, else 0.
    prompts: Tensor | None = None
    angles: Sequence[Tensor] | None = None  # by rope: tables of angles that replace the model's in this pass
    offsets: Sequence[int] = ()  # [S + 1]: span i is tokens offsets[i]:offsets[i + 1]; models without a cache read it
    spans: SpanPlan | None = None  # attention without a cache; set by the model
    types: Tensor | None = None  # [T] int64: 1 for tokens of a pair's second text, else 0; None: all 0
    # [T, layers with experts, chosen] int16: the pass writes the experts that each token chooses. None: it does not.
    # If `sampled` is set, the last layer writes those of the sampled tokens, to the first rows.
    routes: Tensor | None = None


class SampledBatch(Struct):
    """The W sampled tokens of a pass.

    The last layer computes the keys and values of all T tokens, and everything else for the W sampled tokens alone,
    because only the head reads the last layer's output.
    """

    tokens: Tensor  # [W] int64: indices into the pass, ascending; the last index is repeated as padding to least_rows
    attention: AttentionPlan | None  # of the last layer's page group, one span per token; None: the model has no cache
    adapters: PassAdapters | None = None
    padding: int = 0  # number of repeated indices
    indices: Sequence[int] = ()  # `tokens` on the host; models without a cache read it
    spans: SpanPlan | None = None  # attention without a cache, whose queries are these tokens; set by the model


class PageTensor(Struct, frozen=True):
    """One tensor, for example "k", of a page slot. A slot caches the tokens of one page for one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Return the tensor's size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class PoolingHead(Protocol):
    """The layers after pooling: dense layers, or the head for labels; without activation, truncation, normalization."""

    def __call__(self, vectors: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        """Return [N, outputs] float32 for pooled hidden states [N, hidden]. adapters: of these N rows."""


class Model(Protocol):
    """One architecture. Its parameters have no storage until weights are loaded.

    generates        whether the model has logits of tokens; if not, `logits` is never called
    least_rows       if T, and N of `logits`, are at least this, a row's results are bitwise independent of T and N
    skips_unsampled  whether the last layer can compute the sampled tokens alone; if not, Batch.sampled must be None
    logits_dtype     dtype of `logits`: float32, or the activations' dtype if the head's product returns that dtype
    """

    generates: bool
    vocab_size: int
    least_rows: int
    skips_unsampled: bool
    logits_dtype: torch.dtype

    @property
    def experts(self) -> ExpertSizes | None:
        """The sizes of the layers with experts; None: the model does not write Batch.routes."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Every tensor that a checkpoint fills, in order of declaration; a tied tensor is listed once."""

    @property
    def unread(self) -> Container[str]:
        """Names of checkpoint tensors that this model ignores."""

    @property
    def targets(self) -> Sequence[Target]:
        """Every weight matrix and embedding table that adapters may change; empty if the model supports no adapters."""

    @property
    def cache_scales(self) -> Mapping[int, Parameter]:
        """By layer, the divisors [2, K] float32 of an fp8 cache's keys and values. Without an entry: 1."""

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        """Return the groups of layers that cache the same tokens, in pages of `page_tokens` tokens."""

    def page_tensors(self, page_tokens: int) -> Sequence[PageTensor]:
        """Return the tensors of one page slot; all slots have tensors of the same shapes and dtypes.

        A page has as many slots as the largest group has layers; the i-th layer of each group uses slot i. All groups
        share one pool of pages. A page used by a smaller group therefore has unused slots at its end.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states after the last norm: [T, hidden], or [W, hidden] if `batch.sampled` is set."""

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        """Return the logits [N, vocab], in logits_dtype, of hidden states [N, hidden]. adapters: of these N rows."""

    def fused(self, memory: StepMemory, buffers: StepBuffers) -> FusedDecoder | None:
        """Return steps as one call each, or None if no kernel computes the whole model. Called with loaded weights."""

    def embedder(self, reduction: Reduction, most: int) -> TextEmbedder | None:
        """Return the model and its pooling, for whole texts; None: no kernel computes both. Called with loaded weights.

        most  tokens of a step
        """

    def pooling_head(self, task: PoolTask) -> PoolingHead | None:
        """Return the layers after pooling in `task`; None: pooled hidden states are the result."""
