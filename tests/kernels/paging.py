"""Attention batches assembled by hand: spans, tables, slots."""

from __future__ import annotations

from typing import NamedTuple

import torch

from infd.kernels.families.attention import AttentionBatch

CPU = torch.device("cpu")


class PagedSpan(NamedTuple):
    """`count` tokens from position `start` on, of a sequence with page ids `table`."""

    start: int
    count: int
    table: list[int]


def attention_batch(
    spans: list[PagedSpan],
    *,
    page_tokens: int,
    window: int | None = None,
    padding: int = 0,
    slack: int = 0,
    device: torch.device = CPU,
) -> AttentionBatch:
    """Return a step's batch.

    padding  tokens behind the last span; written to page 0
    slack    by how much the host's upper bounds exceed the exact starts
    """
    offsets = [0]
    slots = []
    for start, count, table in spans:
        offsets.append(offsets[-1] + count)
        slots += [table[at // page_tokens] * page_tokens + at % page_tokens for at in range(start, start + count)]
    width = max((len(span.table) for span in spans), default=1)
    return AttentionBatch(
        page_tokens=page_tokens,
        window=window,
        starts=[span.start + slack for span in spans],
        counts=[span.count for span in spans],
        offsets=offsets,
        start=torch.tensor([span.start for span in spans], dtype=torch.int32, device=device),
        table=torch.tensor(
            [span.table + [0] * (width - len(span.table)) for span in spans], dtype=torch.int32, device=device
        ),
        slots=torch.tensor(slots + [0] * padding, dtype=torch.int64, device=device),
    )
