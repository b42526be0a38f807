"""Build the batch of a forward pass from a plan's spans.

The host uploads rows, positions and indices as one array of integers. Tokens and lengths depend on sampled tokens, so
they are read from `Rows` on the device. A step can therefore be issued while the device computes the previous step.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from msgspec import Struct

from infd.kernels.families.attention import AttentionBatch, in_chunks
from infd.kernels.families.matrices import LEAST_ROWS
from infd.models.base import Batch, SampledBatch
from infd.rounding import ceil_div
from infd.runner.readouts.readout import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan
    from infd.runner.instance import Instance
    from infd.runner.readouts.readout import Readout
    from infd.scheduler.plan import Span, StepPlan


class Gathered(Struct):
    """The batch of a forward pass, and the tokens that each readout selected; None if a readout selected no token."""

    batch: Batch
    selections: list[Selection | None]


class Batches(Protocol):
    """Makes the batches of a model's steps."""

    def stage(self, plan: StepPlan) -> None:
        """Store the joins, grants and drafts of a plan. Called for each plan, before `gather`.

        Raises ValueError or OverflowError.
        """

    def gather(self, spans: Sequence[Span], readouts: Sequence[Readout]) -> Gathered:
        """Build the batch of `spans`, in their order. There must be at least one span."""


class RowBatches:
    """Batches of sequences in the persistent batch. Implements Batches."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def stage(self, plan: StepPlan) -> None:
        self._instance.rows.stage(plan.joins, plan.grants, plan.drafts)

    def gather(self, spans: Sequence[Span], readouts: Sequence[Readout]) -> Gathered:
        return gather(spans, self._instance, readouts)


class Placed(Struct):
    """Spans with the rows and positions of their tokens.

    starts, counts, offsets  as in AttentionBatch
    row                      [S] int64: row of each span
    start                    [S] int32: first position of each span
    token_row, position      [T] int64: row and position of each token, padding included
    """

    starts: list[int]
    counts: list[int]
    offsets: list[int]
    row: Tensor
    start: Tensor
    token_row: Tensor
    position: Tensor

    def plan(self, number: int, instance: Instance) -> AttentionPlan:
        """Return the attention plan for page group `number`."""
        rows, layout = instance.rows, instance.layout
        group, end = layout.groups[number], max(map(add, self.starts, self.counts))
        size = group.page_tokens
        table, slots = rows.place_pages(number, self.row, ceil_div(end, size), self.token_row, self.position, size)
        batch = AttentionBatch(
            page_tokens=size,
            window=group.window,
            starts=self.starts,
            counts=self.counts,
            offsets=self.offsets,
            start=self.start,
            table=table,
            slots=slots,
            upload=rows.staging.up,
        )
        return instance.ops.attention.prepare(batch if group.chunk is None else in_chunks(batch, group.chunk))


def gather(spans: Sequence[Span], instance: Instance, readouts: Sequence[Readout]) -> Gathered:
    """Build the batch of `spans`, in their order. There must be at least one span."""
    model, layout, rows = instance.model, instance.layout, instance.rows
    count = len(spans)
    counts = [span.count for span in spans]
    starts = [span.start for span in spans]
    offsets = [0, *accumulate(counts)]
    tokens = offsets[-1]
    row_ids = np.array([*(span.row for span in spans), rows.scratch])
    slots = rows.slots[row_ids]
    has_adapters = bool(slots.any())
    # Adapters may need more rows than the model: torch may compute them although native kernels compute the model.
    needed = max(model.least_rows, LEAST_ROWS) if has_adapters else model.least_rows
    padding = max(0, needed - tokens)
    ends = [start + n for start, n in zip(starts, counts, strict=True)]
    assert max(ends) <= rows.max_len

    # The padding is an additional span on the scratch row, whose page table contains page 0 only.
    span_of = np.repeat(np.arange(count + 1), [*counts, padding])
    within = np.arange(tokens + padding) - np.repeat([*offsets[:-1], tokens], [*counts, padding])
    within[tokens:] = 0
    selected = [readout.select(spans, offsets) for readout in readouts]
    reading = [number for number, chosen in enumerate(selected) if chosen]
    indices = [
        chosen + chosen[-1:] * (needed - len(chosen)) if readout.narrows else chosen
        for readout, chosen in zip(readouts, selected, strict=True)
    ]
    if not reading:
        indices.append([tokens - 1] * max(1, needed))  # the last layer computes at least one token
    alone = reading[0] if reading else -1
    narrowed = (
        model.skips_unsampled
        and (not reading or (len(reading) == 1 and readouts[alone].narrows))
        and len(indices[alone]) < tokens + padding
    )
    sent = rows.upload(np.concatenate([row_ids, [*starts, 0], span_of, within, *indices]).astype(np.int64))
    row, bound, span_index, offset, *index = sent.split_with_sizes(
        [count + 1, count + 1, tokens + padding, tokens + padding, *map(len, indices)]
    )

    start, token_row, position, token = rows.place_tokens(row, bound, span_index, offset)
    rotary, prompts = position, None
    if layout.regimes.several and (regimes := rows.regimes[row_ids]).any():
        regime = rows.upload(regimes)[span_index]
        if (shift := layout.regimes.outgrown) is not None:
            rotary = position + regime * shift
        elif any(start + 1 < prompt for start, prompt in zip(starts, regimes.tolist(), strict=False)):
            prompts = regime  # from the last prompt token on, angles depend on the position alone
    adapted = instance.adapters.adapted(slots[span_of]) if has_adapters else None
    placed = Placed(starts, counts, offsets, row[:count], start[:count], token_row, position)
    batch = Batch(
        tokens=token,
        positions=rotary,
        attention=[placed.plan(number, instance) for number in range(len(layout.groups))],
        cache=instance.cache,
        adapters=adapted,
        prompts=prompts,
    )
    selections = [
        Selection(
            index=each,
            token_row=token_row,
            position=position,
            adapters=None if adapted is None else adapted.at(np.array(chosen)),
            narrowed=narrowed or read == tokens + padding,
        )
        if chosen
        else None
        for each, chosen, read in zip(index, indices, [*map(len, selected), 0], strict=False)
    ]
    if narrowed:
        # The last layer computes only the selected tokens, so its attention plan has a span of one token for each.
        sampled, chosen = selections[alone], indices[alone]
        assert sampled is not None
        bounds = (np.array(starts)[span_of[chosen]] + within[chosen]).tolist()
        ones, upto = [1] * len(chosen), list(range(len(chosen) + 1))
        start = sampled.positions.to(torch.int32)
        single = Placed(bounds, ones, upto, sampled.rows, start, sampled.rows, sampled.positions)
        last = max(range(len(layout.groups)), key=lambda number: max(layout.groups[number].layers))
        padded = len(chosen) - max(1, len(selected[alone]) if reading else 1)
        batch.sampled = SampledBatch(sampled.index, single.plan(last, instance), sampled.adapters, padded)
    return Gathered(batch, selections[: len(readouts)])
