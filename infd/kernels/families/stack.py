"""Several decoder layers in one call, and steps of a whole decoder in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.families.rows import BatchState
    from infd.kernels.recipe import DecoderRecipe, LayerRecipe

    Array = npt.NDArray[Any]


class Stacked(Protocol):
    """Decoder layers computed in one call."""

    def __call__(self, x: Tensor, batch: LayersBatch) -> tuple[Tensor, Tensor]:
        """Run all layers on the embeddings x [T, hidden], which are overwritten.

        Returns (the pending addition, the residual stream) after the last layer, as models/decoder.py Block does: each
        [T, hidden], or [sampled tokens, hidden] if `batch.sampled` is set.
        """


class LayersBatch(Protocol):
    """The fields of models/base.py Batch that layers read."""

    @property
    def positions(self) -> Tensor: ...
    @property
    def attention(self) -> Sequence[AttentionPlan]: ...
    @property
    def cache(self) -> Sequence[KeyValuePages]: ...
    @property
    def beat(self) -> Callable[[], None]: ...
    @property
    def sampled(self) -> SampledLayers | None: ...
    @property
    def routes(self) -> Tensor | None: ...


class SampledLayers(Protocol):
    """The fields of models/base.py SampledBatch that layers read."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def attention(self) -> AttentionPlan | None: ...


class StepMemory(NamedTuple):
    """What outlives the steps of a fused decoder.

    state   the persistent batch
    groups  by page group: tokens of a page; attention window, None: all tokens
    cache   by layer
    pulse   two int64, the count of beats and whether to stop: a step beats before each layer, and ends if it must stop
    """

    state: BatchState
    groups: Sequence[tuple[int, int | None]]
    cache: Sequence[KeyValuePages]
    pulse: int


class StepBuffers(NamedTuple):
    """Inputs and results of a fused decoder, at fixed addresses. A step of S spans and T tokens uses the first ones.

    span_row  [N] int64: row of each span
    bound     [N] int64: upper bound of the position of each span's first token
    counts    [N] int64: tokens of each span
    shift     [N] int64: of each span, added to positions for rows of the rotary tables
    row       [N] int64: of each token
    end       [N] int64: the position after each token
    logits    [N, vocab] float32
    largest   [N] float32: the largest logit after each token
    token     [N] int64: the likeliest token
    verdict   [N] int64: runner/sampled.py's SOUND or NOT_FINITE; of samples that `keep` masked also NOTHING_ALLOWED
    kept      [N] int64: of each span, the number of samples that `keep` kept
    """

    span_row: Tensor
    bound: Tensor
    counts: Tensor
    shift: Tensor
    row: Tensor
    end: Tensor
    logits: Tensor
    largest: Tensor
    token: Tensor
    verdict: Tensor
    kept: Tensor

    @classmethod
    def allocate(cls, tokens: int, vocab_size: int) -> StepBuffers:
        """Return buffers for steps of up to `tokens` tokens, on a CPU."""
        span_row, bound, counts, shift, row, end, token, verdict, kept = torch.zeros((9, tokens), dtype=torch.int64)
        logits, largest = torch.empty(tokens, vocab_size), torch.empty(tokens)
        return cls(span_row, bound, counts, shift, row, end, logits, largest, token, verdict, kept)


class FusedDecoder(Protocol):
    """Steps of a whole decoder, each in one call: from the persistent batch to logits and the likeliest tokens."""

    def __call__(self, spans: int, tokens: int, routes: Tensor | None = None) -> None:
        """Compute a step from the inputs in the buffers. If each span has one token, append the likeliest tokens.

        Results are bitwise those of Stacked, the other families and RowKernels. Tokens behind a row's known tokens are
        drafts. If the pulse is stopped, the results are arbitrary, and no token is appended.

        routes  see models/base.py Batch
        """

    def keep(self, mask: Array | None) -> None:
        """Choose the samples of the last step, in the buffers `token` and `verdict`: the likeliest allowed tokens.

        Of each span, samples are kept as `runner/sampling/acceptance.py` says, and the last one is appended to the
        persistent batch. Samples behind it are not masked. Logits of rows whose likeliest token is not allowed are
        overwritten.

        mask  contiguous int32 [T, ceil(vocab / 32)] bitmask of the allowed tokens; None: all tokens
        """


class Stack(Protocol):
    """Fuses decoder layers into one call."""

    def build(self, layers: Sequence[LayerRecipe]) -> Stacked | None:
        """Return the layers as one call, or None if the implementation cannot compute all layers."""

    def decoder(
        self, layers: Stacked, ends: DecoderRecipe, memory: StepMemory, buffers: StepBuffers
    ) -> FusedDecoder | None:
        """Return steps of the decoder as one call each, or None if the implementation cannot compute `ends`.

        layers  from `build`
        """
