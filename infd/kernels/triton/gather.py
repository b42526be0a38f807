"""Gather the page ids within the queries' windows into one list, as FlashInfer's planned kernels read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024  # pages per program; most sequences have fewer pages


@triton.jit(do_not_specialize=["table_span"])
def _gather(table, first, skipped, pages, table_span, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    begin = tl.load(first + span)
    count = tl.load(first + span + 1) - begin
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    seen = table + span.to(tl.int64) * table_span + tl.load(skipped + span)
    tl.store(pages + begin + at, tl.load(seen + at, mask=inside, other=0), mask=inside)


def gather(table: Tensor, first: Tensor, skipped: Tensor, pages: Tensor) -> None:
    """Copy each span's pages from table [S, width], after the first `skipped` [S], to `pages` from `first` [S + 1] on.

    All int32. Entries of `pages` that belong to no span are unchanged.
    """
    spans, width = table.shape
    _gather[spans, triton.cdiv(width, BLOCK)](table, first, skipped, pages, table.stride(0), BLOCK=BLOCK)
