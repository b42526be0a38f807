"""The `Model` protocol, and `Batch`, the input of one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from msgspec import Struct
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.models.parameter import Parameter, Target
    from infd.scheduler.layout import CacheLayout


class PassAdapters(Protocol):
    """The LoRA adapters of a pass, by token. In a pass without adapters, Batch.adapters is None."""

    def add(self, y: Tensor, x: Tensor, target: Target) -> None:
        """Add the adapters' x A^T B^T of `target` to y [T, outputs], in place; x [T, inputs]."""

    def add_rows(self, y: Tensor, tokens: Tensor, target: Target) -> None:
        """Add the adapters' rows of the table `target` to y [T, outputs], in place; tokens [T] int64."""


def _unwatched() -> None:
    """No-op, for a pass whose progress is not counted."""


class Batch(Struct, kw_only=True):
    """One forward pass: T tokens, packed span after span, padded to the model's least_rows.

    `runner/batch.py` builds batches, with the fields that models' layers read.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64: rows of the rotary tables
    attention: Sequence[AttentionPlan]  # by page group
    cache: Sequence[KeyValuePages]  # by layer
    beat: Callable[[], None] = _unwatched  # called between layers: counts progress; raises to abort the pass
    adapters: PassAdapters | None = None
    sampled: SampledBatch | None = None  # None: the model returns hidden states of all tokens
    # [T] int64: the length of each token's prompt if the token's rotary angles depend on the length, else 0.
    prompts: Tensor | None = None
    angles: Sequence[Tensor] | None = None  # by rope: tables that replace the model's tables in this pass


class SampledBatch(Struct):
    """The W sampled tokens of a pass.

    The last layer caches the keys and values of all T tokens, and computes everything else for the W sampled tokens
    alone: only the head reads the last layer's output.
    """

    tokens: Tensor  # [W] int64: indices into the pass, ascending; the last index is repeated as padding to least_rows
    attention: AttentionPlan  # of the last layer's page group, one span per token
    adapters: PassAdapters | None = None


class PageTensor(Struct, frozen=True):
    """One named tensor of a page slot: one layer's cache of one page's tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Return the tensor's size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Model(Protocol):
    """One architecture. Its parameters have no storage until weights are loaded.

    least_rows       smallest T, and smallest N of `logits`, at which results do not depend on T or N to the last bit
    skips_unsampled  whether the last layer can compute the sampled tokens alone; if False, Batch.sampled is always None
    logits_dtype     dtype of `logits`: float32, or the activations' dtype if the head's product returns it
    """

    vocab_size: int
    least_rows: int
    skips_unsampled: bool
    logits_dtype: torch.dtype

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Every tensor that a checkpoint fills, in order of use; a tied tensor once."""

    @property
    def unread(self) -> Container[str]:
        """Names of checkpoint tensors that this model ignores."""

    @property
    def targets(self) -> Sequence[Target]:
        """Every product and table that adapters may change, in order of use; empty if none is supported."""

    @property
    def cache_scales(self) -> Mapping[int, Parameter]:
        """By layer, the divisors [2, K] float32 of an fp8 cache; a layer without an entry divides by 1."""

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        """Return the page groups: which layers cache which tokens, in pages of `page_tokens`."""

    def page_tensors(self, page_tokens: int) -> Sequence[PageTensor]:
        """Return the tensors of one page slot, equal for every layer.

        A page has as many slots as the largest group has layers; the i-th layer of each group uses slot i. All groups
        share one pool of pages, so pages of a smaller group leave their last slots unused.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states after the last norm: [T, hidden], or [W, hidden] if `batch.sampled` is set."""

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        """Return logits [N, vocab] in logits_dtype of hidden [N, hidden]; `adapters` applies to the N rows."""
