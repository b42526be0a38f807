"""An encoder in one call: its embeddings and its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.span_attention import SpanPlan
    from infd.kernels.recipe import EmbeddingsRecipe, EncoderLayerRecipe
    from infd.pooling.settings import Reduction


class SampledInputs(NamedTuple):
    """The tokens whose results are read, see models/base.py SampledBatch.

    tokens  [W] int64, ascending, perhaps repeated
    plan    of attention whose queries are these tokens
    """

    tokens: Tensor
    plan: SpanPlan


class EncoderInputs(Struct, frozen=True):
    """The tokens of a step.

    tokens     [T] int64
    positions  [T] int64: rows of tables of positions, and of rotary tables
    types      [T] int64; None: all 0
    sampled    None: the results of all tokens are read
    """

    tokens: Tensor
    positions: Tensor
    types: Tensor | None
    sampled: SampledInputs | None = None


class TextEmbedder(Protocol):
    """An encoder and the pooling of its texts, without a call of torch.

    tokens, positions  [N] int64: the inputs of a call, text after text
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    def __call__(
        self, offsets: Sequence[int], beat: Callable[[], None]
    ) -> tuple[npt.NDArray[np.float32], Sequence[bool]]:
        """Return each text's embedding of length 1, [S, width], and of each text whether its numbers are finite.

        The bits are those of StackedEncoder and Pooling.

        offsets  [S + 1]: text i is tokens offsets[i]:offsets[i + 1]; at most N in all
        beat     called before each few layers
        """


class StackedEncoder(Protocol):
    """An encoder's layers computed in one call, after its embeddings if a recipe of these was given."""

    def __call__(self, inputs: EncoderInputs, x: Tensor | None, plan: SpanPlan, beat: Callable[[], None]) -> Tensor:
        """Return the last layer's output [T, hidden], or [W, hidden] if `inputs.sampled` is set.

        x     the embeddings [T, hidden], which are overwritten; None: the call computes them. A row of a table that is
              out of range is NaN
        beat  called before each few layers
        """

    def embedder(self, reduction: Reduction, most: int) -> TextEmbedder | None:
        """Return the encoder with a pooling, for steps of up to `most` tokens; None: it does not compute all of it."""


class EncoderStack(Protocol):
    """Fuses an encoder into one call."""

    def build(self, layers: Sequence[EncoderLayerRecipe], embeddings: EmbeddingsRecipe | None) -> StackedEncoder | None:
        """Return the encoder as one call, or None if the implementation cannot compute all layers.

        embeddings  None: the caller computes them
        """
