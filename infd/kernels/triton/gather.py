"""Put the ids of the pages that queries see side by side, in one launch: so FlashInfer's planned kernels want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024  # pages that a program looks at: more than most sequences have


@triton.jit(do_not_specialize=["table_span"])
def _gather(table, first, skipped, pages, table_span, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    begin = tl.load(first + span)
    held = tl.load(first + span + 1) - begin
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < held
    seen = table + span.to(tl.int64) * table_span + tl.load(skipped + span)
    tl.store(pages + begin + at, tl.load(seen + at, mask=inside, other=0), mask=inside)


def gather(table: Tensor, first: Tensor, skipped: Tensor, pages: Tensor) -> None:
    """Put each span's pages, but the first `skipped` [S], from table [S, width] to where `first` [S + 1] says.

    All int32; of `pages`, what no span has stays as it was.
    """
    spans, width = table.shape
    _gather[spans, triton.cdiv(width, BLOCK)](table, first, skipped, pages, table.stride(0), BLOCK=BLOCK)
