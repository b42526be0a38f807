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
from infd.models.base import Batch

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

    last     [N or more] int64: each sampling span's last token in the step; one repeated, where products need more rows
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
    last += last[:1] * (needed - sampling)
    scoring = [token for i, span in enumerate(spans) for token in range(offsets[i], offsets[i] + span.scores)]
    sent = rows.upload(np.concatenate([row_ids, [*starts, 0], span_of, within, last, scoring]).astype(np.int64))
    row, bound, span_index, offset, last_index, scoring_index = torch.split(
        sent, [count + 1, count + 1, tokens + padding, tokens + padding, len(last), len(scoring)]
    )

    start = torch.minimum(bound, rows.length[row] - 1)  # a span never begins behind the last token that is known
    position = start[span_index] + offset
    token_row = row[span_index]
    plans: list[AttentionPlan] = []
    for number, group in enumerate(layout.groups):
        size = group.page_tokens
        page = rows.tables[token_row, number, position // size]
        plans.append(
            attention.prepare(
                AttentionBatch(
                    page_tokens=size,
                    window=group.window,
                    starts=starts,
                    counts=counts,
                    offsets=offsets,
                    start=start[:count].to(torch.int32),
                    table=rows.tables[:, number, : -(-max(ends) // size)].index_select(0, row[:count]),
                    slots=page.to(torch.int64) * size + position % size,
                    upload=rows.staging.up,
                )
            )
        )
    wanted = last_index[:sampling]
    adapted = adapters.adapted(slots[span_of])
    return Gathered(
        batch=Batch(
            tokens=rows.tokens[token_row, position].to(torch.int64),
            positions=position,
            attention=plans,
            cache=cache,
            adapters=adapted,
        ),
        last=last_index,
        rows=token_row[wanted],
        ends=position[wanted] + 1,
        scoring=scoring_index,
        targets=rows.tokens[token_row[scoring_index], position[scoring_index] + 1].to(torch.int64),
        choosing_adapters=None if adapted is None or not last else adapted.at(np.array(last)),
        scoring_adapters=None if adapted is None or not scoring else adapted.at(np.array(scoring)),
    )
