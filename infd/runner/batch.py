"""Turn a plan's spans into what one forward pass reads.

The host sends one array of integers; everything that depends on what was
sampled (tokens, lengths) is looked up in `Rows` on the device, so a step can be
issued while the one before it is still being computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct

from infd.kernels.ops import LEAST_ROWS, AttentionBatch
from infd.models.base import Batch, Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from infd.kernels.ops import Attention, AttentionPlan, KeyValuePages
    from infd.runner.adapters import AdaptedRows, DeviceSlots
    from infd.runner.rows import Rows
    from infd.scheduler.layout import CacheLayout
    from infd.scheduler.plan import Span


class Gathered(Struct):
    """A forward pass, and where in it stands what is wanted of it.

    last     [N or more] int64: each sampling span's last token in the step; the last repeated where products need more
             rows. They are what the batch wants, where it does not want all
    rows     [N] int64: their rows
    ends     [N] int64: the position of the token to sample, after all that is known
    scoring  [M] int64: the tokens whose successors are scored, span after span
    targets  [M] int64: these successors

    choosing_adapters, scoring_adapters  what the tokens `last` and `scoring` want of adapters
    """

    batch: Batch
    last: Tensor
    rows: Tensor
    ends: Tensor
    scoring: Tensor
    targets: Tensor
    choosing_adapters: AdaptedRows | None = None
    scoring_adapters: AdaptedRows | None = None

    def choosing(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of `last`, of those that the model has returned."""
        return hidden[self.last] if self.batch.wanted is None else hidden


class Placed(Struct):
    """Spans, and the tokens of them: of each its row and its position.

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

    def batch(
        self,
        rows: Rows,
        layout: CacheLayout,
        cache: Sequence[KeyValuePages],
        attention: Attention,
        adapters: AdaptedRows | None,
    ) -> Batch:
        """Return the pass over these tokens."""
        end = max(map(sum, zip(self.starts, self.counts, strict=True)))
        plans: list[AttentionPlan] = []
        for number, group in enumerate(layout.groups):
            size = group.page_tokens
            page = rows.tables[self.token_row, number, self.position // size]
            plans.append(
                attention.prepare(
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
            )
        return Batch(
            tokens=rows.tokens[self.token_row, self.position].to(torch.int64),
            positions=self.position,
            attention=plans,
            cache=cache,
            adapters=adapters,
        )


def gather(
    spans: Sequence[Span],
    rows: Rows,
    layout: CacheLayout,
    cache: Sequence[KeyValuePages],
    attention: Attention,
    adapters: DeviceSlots,
    least_rows: int,
) -> Gathered:
    """Build the batch of `spans`, at least one, in their order.

    least_rows  of the model; what adapters add is torch's, perhaps, and needs LEAST_ROWS
    """
    count = len(spans)
    counts = [span.count for span in spans]
    starts = [span.start for span in spans]
    offsets = [0, *np.cumsum(counts).tolist()]
    tokens = offsets[-1]
    row_ids = [*(span.row for span in spans), rows.scratch]
    slots = rows.slots[row_ids]
    needed = max(least_rows, LEAST_ROWS) if slots.any() else least_rows
    padding = max(0, needed - tokens)
    ends = [start + n for start, n in zip(starts, counts, strict=True)]
    assert max(ends) <= rows.max_len

    # Padding belongs to a span of its own, on the scratch row: its slots come out on page 0 like anyone else's.
    span_of = np.repeat(np.arange(count + 1), [*counts, padding])
    within = np.arange(tokens + padding) - np.repeat([*offsets[:-1], tokens], [*counts, padding])
    within[tokens:] = 0
    last = [offsets[i + 1] - 1 for i, span in enumerate(spans) if span.samples]
    sampling = len(last)
    last = last or [tokens - 1]
    last += last[-1:] * (needed - len(last))
    scoring = [token for i, span in enumerate(spans) for token in range(offsets[i], offsets[i] + span.scores)]
    sent = rows.upload(np.concatenate([row_ids, [*starts, 0], span_of, within, last, scoring]).astype(np.int64))
    row, bound, span_index, offset, last_index, scoring_index = torch.split(
        sent, [count + 1, count + 1, tokens + padding, tokens + padding, len(last), len(scoring)]
    )

    start = torch.minimum(bound, rows.length[row] - 1)  # a span never begins behind the last token that is known
    position = start[span_index] + offset
    token_row = row[span_index]
    adapted = adapters.adapted(slots[span_of])
    choosing_adapters = None if adapted is None else adapted.at(np.array(last))
    placed = Placed(starts, counts, offsets, row[:count], start[:count], token_row, position)
    batch = placed.batch(rows, layout, cache, attention, adapted)
    last_row, last_position = token_row[last_index], position[last_index]
    if len(last) < tokens + padding and not scoring:
        bounds = (np.array(starts)[span_of[last]] + within[last]).tolist()
        ones, upto = [1] * len(last), list(range(len(last) + 1))
        each = Placed(bounds, ones, upto, last_row, last_position, last_row, last_position)
        batch.wanted = Wanted(last_index, each.batch(rows, layout, cache, attention, choosing_adapters))
    return Gathered(
        batch=batch,
        last=last_index,
        rows=last_row[:sampling],
        ends=last_position[:sampling] + 1,
        scoring=scoring_index,
        targets=rows.tokens[token_row[scoring_index], position[scoring_index] + 1].to(torch.int64),
        choosing_adapters=choosing_adapters,
        scoring_adapters=None if adapted is None or not scoring else adapted.at(np.array(scoring)),
    )
