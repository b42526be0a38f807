"""The persistent batch on a GPU: one launch a step and page group, and one for the sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.rows import Kept, Seats

PAGES = 1024  # page ids that a program copies
ROWS = 128  # rows that a program appends to


@triton.jit(do_not_specialize=["rows", "bounds"])
def seat(
    tokens,
    length,
    held,
    rows,
    bounds,
    position,
    start,
    token,
    table,
    slots,
    tokens_row,
    held_row,
    pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row's step inputs, and a block of its page ids. PAGE 0: without a cache."""
    at = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows + at)
    place = tl.minimum(tl.load(bounds + at), tl.load(length + row) - 1)
    if part == 0:
        tl.store(position + at, place)
        tl.store(start + at, place.to(tl.int32))
        tl.store(token + at, tl.load(tokens + row * tokens_row + place).to(tl.int64))
    if PAGE > 0:
        held += row * held_row
        last = place // PAGE
        if part == 0:
            tl.store(slots + at, tl.load(held + last).to(tl.int64) * PAGE + place % PAGE)
        page = part * BLOCK + tl.arange(0, BLOCK)
        inside = (page < pages) & (page <= last)  # later page ids are never read
        tl.store(table + at.to(tl.int64) * pages + page, tl.load(held + page, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["rows", "ends", "new", "count"])
def append(tokens, length, rows, ends, new, count, tokens_row, BLOCK: tl.constexpr):
    """Write one token to each row, and the row's new length."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    end = tl.load(ends + at, mask=inside, other=0)
    token = tl.load(new + at, mask=inside, other=0)
    tl.store(tokens + row * tokens_row + end, token.to(tl.int32), mask=inside)
    tl.store(length + row, end + 1, mask=inside)


class Rows:
    """The rows family."""

    def seat(self, kept: Kept, seats: Seats) -> None:
        groups = [*enumerate(zip(seats.page_tokens, seats.tables, seats.slots, strict=True))]
        for number, (page_tokens, table, slots) in groups:
            _seat(kept, seats, page_tokens, kept.tables[:, number], table, slots)
        if not groups:
            _seat(kept, seats, 0, kept.tokens, seats.start, seats.start)

    def append(self, kept: Kept, row: Tensor, end: Tensor, token: Tensor) -> None:
        append[(triton.cdiv(len(row), ROWS),)](
            kept.tokens, kept.length, row, end, token, len(row), kept.tokens.stride(0), BLOCK=ROWS
        )


def _seat(kept: Kept, seats: Seats, page_tokens: int, held: Tensor, table: Tensor, slots: Tensor) -> None:
    pages = table.shape[-1]
    seat[len(seats.row), triton.cdiv(pages, PAGES) if page_tokens else 1](
        kept.tokens,
        kept.length,
        held,
        seats.row,
        seats.bound,
        seats.position,
        seats.start,
        seats.token,
        table,
        slots,
        kept.tokens.stride(0),
        held.stride(0),
        pages,
        PAGE=page_tokens,
        BLOCK=PAGES,
    )
