"""Compute steps of whole texts, of which only embeddings are asked, without torch.

The runner computes all other steps from batches, with equal results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from infd.request import Pooled
from infd.runner.readouts.pooling import NOT_FINITE, STORED, Postprocessing
from infd.runner.readouts.readout import Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infd.kernels.families.encoder import TextEmbedder
    from infd.runner.instance import Instance
    from infd.runner.staging import Staging
    from infd.runner.texts import Text, Texts
    from infd.scheduler.plan import Span, StepResult

    Array = npt.NDArray[Any]

MOST_TOKENS: Final = 1024  # of a step: with more, calls of torch take a hundredth of its time


def fused_texts(instance: Instance, texts: Texts) -> FusedTexts | None:
    """Return the steps of a model with loaded weights; None if no kernel computes embeddings without torch."""
    if instance.rows.device.type != "cpu":
        return None
    embed = instance.model.embedder(instance.pooling.pooling, MOST_TOKENS)
    return None if embed is None else FusedTexts(instance, texts, embed)


class FusedTexts:
    """Computes steps of up to MOST_TOKENS tokens."""

    def __init__(self, instance: Instance, texts: Texts, embed: TextEmbedder) -> None:
        self._texts, self._embed = texts, embed
        self._settings, self._least_rows = instance.pooling, instance.model.least_rows
        self._places = np.arange(MOST_TOKENS)
        self._beat = instance.pulse.beat

    def forward(self, spans: Sequence[Span]) -> list[Reading] | None:
        """Compute a step; None if it has too few or too many tokens, or texts of which more is asked."""
        tokens, positions, places = self._embed.tokens, self._embed.positions, self._places
        offsets, end = [0], 0
        for span in spans:
            text = self._texts.of(span.row)
            begin, end = end, end + text.count
            if end > MOST_TOKENS or not span.pools or not self._plain(text):
                return None
            tokens[begin:end] = text.tokens
            positions[begin:end] = places[: text.count]
            offsets.append(end)
        if end < self._least_rows:
            return None
        return [Embeddings(*self._embed(offsets, self._beat))]

    def _plain(self, text: Text) -> bool:
        """Return whether a text's embedding is all that is asked of it, as the model is made to give it."""
        pool = text.pool
        if pool is None or pool.task != "embed" or text.slot or text.regime or pool.skip or pool.second is not None:
            return False
        return Postprocessing.of(pool, self._settings).plain


class Embeddings(Reading):
    """The embeddings of a step's texts, [S, width] float32; `finite`: of each text whether its hidden states are."""

    def __init__(self, vectors: Array, finite: Sequence[bool]) -> None:
        self._vectors = vectors
        self._finite = finite

    def sample(self, mask: Array | None) -> None:
        """No-op: embeddings do not depend on the mask."""

    def download(self, staging: Staging) -> None:
        """No-op: the results are on the host."""

    def read(self, result: StepResult) -> None:
        vectors = self._vectors.astype(STORED, copy=False)
        for index, finite in enumerate(self._finite):
            if finite:
                result.pooled[index] = Pooled(vectors.shape[1], vectors[index].tobytes())
            else:
                result.failed[index] = NOT_FINITE
