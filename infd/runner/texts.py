"""Whole texts: the steps of models without a cache.

Such a model computes each text in one step, so nothing on the device outlives a step: tokens and positions come from
the joins alone, and are uploaded together. `rows.py` and `batch.py` do this for the other models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from infd.kernels.families.matrices import LEAST_ROWS
from infd.models.base import Batch, SampledBatch
from infd.request import Pool, pick
from infd.runner.batch import Gathered
from infd.runner.readouts.readout import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.runner.adapters import AdaptedRows
    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Readout
    from infd.scheduler.plan import Span, StepPlan

    Array = npt.NDArray[Any]


class Text(Struct, frozen=True):
    """A text whose sequence runs.

    tokens  [count] int64
    pool    how the text is pooled; None: not at all
    regime  of its rotary angles, see layout.Regimes
    slot    of its adapter; 0: none
    """

    count: int
    tokens: Array
    pool: Pool | None
    regime: int
    slot: int

    @property
    def second(self) -> int | None:
        """Return the position of the first token of a pair's second text; None: the text is no pair."""
        return None if self.pool is None else self.pool.second


class Texts:
    """The texts of running sequences, by row. Implements batch.Batches."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._upload = instance.rows.upload
        self._places = np.arange(instance.rows.max_len)
        self.by_row: dict[int, Text] = {}

    def stage(self, plan: StepPlan) -> None:
        rows = self._instance.rows
        for join in plan.joins:
            tokens = rows.checked(join, np.int64)
            self.by_row[join.row] = Text(len(tokens), tokens, pick(Pool, join.wants), join.regime, join.slot)
            rows.slots[join.row] = join.slot

    def gather(self, spans: Sequence[Span], readouts: Sequence[Readout]) -> Gathered:
        instance = self._instance
        model = instance.model
        texts, offsets, tokens = [], [0], 0
        adapted = paired = turned = False
        for span in spans:
            text = self.by_row[span.row]
            texts.append(text)
            tokens += text.count
            offsets.append(tokens)
            adapted, paired, turned = (
                adapted or text.slot > 0,
                paired or text.second is not None,
                turned or text.regime > 0,
            )
        # Adapters may need more rows than the model: torch may compute them although native kernels compute the model.
        needed = max(model.least_rows, LEAST_ROWS) if adapted else model.least_rows
        total = max(tokens, needed)
        rest = [np.zeros(total - tokens, np.int64)] if total > tokens else []  # padding: token 0 at position 0

        selected = [readout.select(spans, offsets) for readout in readouts]
        alone, padding = self._alone(readouts, selected, needed, total), 0
        if alone is not None:
            padding = max(0, needed - len(selected[alone]))
            selected[alone] += selected[alone][-1:] * padding
        indices = [np.array(chosen if len(chosen) < total else (), np.int64) for chosen in selected]
        known, places = [text.tokens for text in texts], [self._places[: text.count] for text in texts]
        token, position, *index = instance.rows.staging.up_together(
            [*known, *rest], [*places, *rest], *([each] for each in indices)
        )
        rows = self._adapters(texts, total) if adapted else None
        batch = Batch(
            tokens=token,
            positions=position,
            attention=(),
            cache=instance.cache,
            adapters=rows,
            offsets=offsets,
        )
        if paired:
            batch.types = self._types(texts, total)
        if turned:
            self._turn(batch, texts, total)
        if alone is not None:
            chosen = selected[alone]
            adapters = None if rows is None else rows.at(np.array(chosen))
            batch.sampled = SampledBatch(index[alone], None, adapters, padding, chosen)
        selections = [
            Selection(each, narrowed=number == alone or len(chosen) == total) if chosen else None
            for number, (each, chosen) in enumerate(zip(index, selected, strict=True))
        ]
        return Gathered(batch, selections)

    def _alone(self, readouts: Sequence[Readout], selected: Sequence[list[int]], needed: int, total: int) -> int | None:
        """Return the index of the readout whose tokens are all that the last layer computes; None: it computes all."""
        reading = [number for number, chosen in enumerate(selected) if chosen]
        if not self._instance.model.skips_unsampled or len(reading) != 1:
            return None
        (alone,) = reading
        return alone if readouts[alone].narrows and max(needed, len(selected[alone])) < total else None

    def _adapters(self, texts: Sequence[Text], total: int) -> AdaptedRows | None:
        slots, counts = [text.slot for text in texts], [text.count for text in texts]
        return self._instance.adapters.adapted(np.repeat([*slots, 0], [*counts, total - sum(counts)]))

    def _types(self, texts: Sequence[Text], total: int) -> Tensor:
        """Return Batch.types."""
        types = np.zeros(total, np.int64)
        begin = 0
        for text in texts:
            if text.second is not None:
                types[begin + text.second : begin + text.count] = 1
            begin += text.count
        return self._upload(types)

    def _turn(self, batch: Batch, texts: Sequence[Text], total: int) -> None:
        """Make rotary angles depend on the regimes of texts, see layout.Regimes."""
        regimes, counts = [text.regime for text in texts], [text.count for text in texts]
        regime = self._upload(np.repeat(np.array([*regimes, 0]), [*counts, total - sum(counts)]))
        if (shift := self._instance.layout.regimes.outgrown) is not None:
            batch.positions = batch.positions + regime * shift
        else:
            batch.prompts = regime
