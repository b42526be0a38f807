"""Turn a plan's spans into what one forward pass reads.

The host sends one array of integers; everything that depends on what was
sampled (tokens, lengths) is looked up in `Rows` on the device, so a step can be
issued while the one before it is still being computed.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct

from infd.kernels.families.attention import AttentionBatch
from infd.kernels.families.matrices import LEAST_ROWS
from infd.models.base import Batch, Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan
    from infd.runner.adapters import AdaptedRows
    from infd.runner.instance import Instance
    from infd.scheduler.plan import Span


class Gathered(Struct):
    """A forward pass, and where in it stands what is wanted of it.

    wanted   [N or more] int64: each sampling span's last token in the step; the last repeated where products need more
             rows. Where no span samples, the last token of all
    rows     [N] int64: their rows
    ends     [N] int64: the position of the token to sample, after all that is known
    scoring  [M] int64: the tokens whose successors are scored, span after span
    targets  [M] int64: these successors

    choosing_adapters, scoring_adapters  what the tokens `wanted` and `scoring` want of adapters
    """

    batch: Batch
    wanted: Tensor
    rows: Tensor
    ends: Tensor
    scoring: Tensor
    targets: Tensor
    choosing_adapters: AdaptedRows | None = None
    scoring_adapters: AdaptedRows | None = None

    def choosing(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of `wanted`, of those that the model has returned."""
        return hidden[self.wanted] if self.batch.wanted is None else hidden


class Placed(Struct):
    """Spans, and the row and the position of each of their tokens.

    starts, counts, offsets  as in AttentionBatch
    row, start               [S] int64
    token_row, position      [T] int64, padding included
    """

    starts: list[int]
    counts: list[int]
    offsets: list[int]
    row: Tensor
    start: Tensor
    token_row: Tensor
    position: Tensor

    def plan(self, number: int, instance: Instance) -> AttentionPlan:
        """Return what attention prepares for a page group."""
        rows, layout = instance.rows, instance.layout
        group, end = layout.groups[number], max(map(add, self.starts, self.counts))
        size = group.page_tokens
        page = rows.tables[self.token_row, number, self.position // size]
        return instance.ops.attention.prepare(
            AttentionBatch(
                page_tokens=size,
                window=group.window,
                starts=self.starts,
                counts=self.counts,
                offsets=self.offsets,
                start=self.start.to(torch.int32),
                table=rows.tables[:, number, : -(-end // size)].index_select(0, self.row),
                slots=page.to(torch.int64) * size + self.position % size,
                upload=rows.staging.up,
            )
        )


def gather(spans: Sequence[Span], instance: Instance) -> Gathered:
    """Build the batch of `spans`, at least one, in their order."""
    model, layout, rows = instance.model, instance.layout, instance.rows
    count = len(spans)
    counts = [span.count for span in spans]
    starts = [span.start for span in spans]
    offsets = [0, *np.cumsum(counts).tolist()]
    tokens = offsets[-1]
    row_ids = [*(span.row for span in spans), rows.scratch]
    slots = rows.slots[row_ids]
    # What adapters add is torch's, perhaps.
    needed = max(model.least_rows, LEAST_ROWS) if slots.any() else model.least_rows
    padding = max(0, needed - tokens)
    ends = [start + n for start, n in zip(starts, counts, strict=True)]
    assert max(ends) <= rows.max_len

    # Padding belongs to a span of its own, on the scratch row: its slots come out on page 0 like anyone else's.
    span_of = np.repeat(np.arange(count + 1), [*counts, padding])
    within = np.arange(tokens + padding) - np.repeat([*offsets[:-1], tokens], [*counts, padding])
    within[tokens:] = 0
    sampling = [offsets[i + 1] - 1 for i, span in enumerate(spans) if span.samples]
    wanted = sampling or [tokens - 1]
    wanted = wanted + wanted[-1:] * (needed - len(wanted))
    scoring = [token for i, span in enumerate(spans) for token in range(offsets[i], offsets[i] + span.scores)]
    sent = rows.upload(np.concatenate([row_ids, [*starts, 0], span_of, within, wanted, scoring]).astype(np.int64))
    row, bound, span_index, offset, wanted_index, scoring_index = torch.split(
        sent, [count + 1, count + 1, tokens + padding, tokens + padding, len(wanted), len(scoring)]
    )

    start = torch.minimum(bound, rows.length[row] - 1)  # a span never begins behind the last token that is known
    position = start[span_index] + offset
    token_row = row[span_index]
    turned, prompts = position, None
    if layout.regimes.several and (regimes := rows.regimes[row_ids]).any():
        regime = rows.upload(regimes)[span_index]
        if (shift := layout.regimes.outgrown) is not None:
            turned = position + regime * shift
        elif any(start + 1 < prompt for start, prompt in zip(starts, regimes.tolist(), strict=False)):
            prompts = regime  # what follows a prompt, and its own last token, has angles by position
    adapted = instance.adapters.adapted(slots[span_of])
    choosing_adapters = None if adapted is None else adapted.at(np.array(wanted))
    placed = Placed(starts, counts, offsets, row[:count], start[:count], token_row, position)
    batch = Batch(
        tokens=rows.tokens[token_row, position].to(torch.int64),
        positions=turned,
        attention=[placed.plan(number, instance) for number in range(len(layout.groups))],
        cache=instance.cache,
        adapters=adapted,
        prompts=prompts,
    )
    wanted_row, wanted_position = token_row[wanted_index], position[wanted_index]
    if model.narrows and layout.groups and not scoring and len(wanted) < tokens + padding:
        bounds = (np.array(starts)[span_of[wanted]] + within[wanted]).tolist()
        ones, upto = [1] * len(wanted), list(range(len(wanted) + 1))
        alone = Placed(bounds, ones, upto, wanted_row, wanted_position, wanted_row, wanted_position)
        last = max(range(len(layout.groups)), key=lambda number: max(layout.groups[number].layers))
        batch.wanted = Wanted(wanted_index, alone.plan(last, instance), choosing_adapters)
    return Gathered(
        batch=batch,
        wanted=wanted_index,
        rows=wanted_row[: len(sampling)],
        ends=wanted_position[: len(sampling)] + 1,
        scoring=scoring_index,
        targets=rows.tokens[token_row[scoring_index], position[scoring_index] + 1].to(torch.int64),
        choosing_adapters=choosing_adapters,
        scoring_adapters=None if adapted is None or not scoring else adapted.at(np.array(scoring)),
    )
