"""Compute steps of whole texts, of which only embeddings are asked, without torch.

The runner computes all other steps from batches, with equal results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from infd.runner.readouts.pooling import Postprocessing, write
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
    if instance.rows.device.type != "cpu" or "embed" not in instance.pooling.tasks:
        return None
    embed = instance.model.embedder(instance.pooling.pooling, MOST_TOKENS)
    return None if embed is None else FusedTexts(instance, texts, embed)


class FusedTexts:
    """Computes steps of up to as many tokens as the embedder's inputs have."""

    def __init__(self, instance: Instance, texts: Texts, embed: TextEmbedder) -> None:
        self._texts, self._embed = texts, embed
        self._settings = instance.pooling
        self._places = np.arange(len(embed.tokens))
        self._beat = instance.pulse.beat

    def forward(self, spans: Sequence[Span]) -> list[Reading] | None:
        """Compute a step; None if it has too many tokens, or texts of which more is asked."""
        tokens, positions, places = self._embed.tokens, self._embed.positions, self._places
        offsets, end = [0], 0
        for span in spans:
            text = self._texts.by_row[span.row]
            begin, end = end, end + text.count
            if end > len(tokens) or not span.pools or not self._plain(text):
                return None
            tokens[begin:end] = text.tokens
            positions[begin:end] = places[: text.count]
            offsets.append(end)
        return [EmbeddedTexts(*self._embed(offsets, self._beat))]

    def _plain(self, text: Text) -> bool:
        """Return whether only a text's normalized embedding is asked of it."""
        pool = text.pool
        if pool is None or pool.task != "embed" or text.slot or text.regime or pool.skip or pool.second is not None:
            return False
        return Postprocessing.of(pool, self._settings).plain


class EmbeddedTexts(Reading):
    """The embeddings of a step's texts."""

    def __init__(self, vectors: Array, finite: Sequence[bool]) -> None:
        """Hold embeddings [S, width] float32, and of each text whether its hidden states are finite."""
        self._vectors = vectors
        self._finite = finite

    def sample(self, mask: Array | None) -> None:
        """No-op: embeddings do not depend on the mask."""

    def download(self, staging: Staging) -> None:
        """No-op: the results are on the host."""

    def read(self, result: StepResult) -> None:
        write(result, [(span, 1) for span in range(len(self._finite))], self._vectors, self._finite)
