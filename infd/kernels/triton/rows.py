"""The persistent batch on a GPU: one launch per step and page group, and one launch for the sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from infd.kernels.reference.rows import RowKernels as Reference

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.rows import BatchState, DecodeInputs

PAGES = 1024  # page ids that a program copies
ROWS = 128  # rows that a program appends to


@triton.jit(do_not_specialize=["rows", "bounds"])
def gather_inputs(
    tokens,
    length,
    source_table,
    rows,
    bounds,
    position,
    start,
    token,
    table,
    slots,
    tokens_row,
    source_row,
    pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row's step inputs, and a block of the row's page ids. PAGE 0: the model has no cache."""
    at = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows + at)
    place = tl.minimum(tl.load(bounds + at), tl.load(length + row) - 1)
    if part == 0:
        tl.store(position + at, place)
        tl.store(start + at, place.to(tl.int32))
        tl.store(token + at, tl.load(tokens + row * tokens_row + place).to(tl.int64))
    if PAGE > 0:
        source_table += row * source_row
        last = place // PAGE
        if part == 0:
            tl.store(slots + at, tl.load(source_table + last).to(tl.int64) * PAGE + place % PAGE)
        page = part * BLOCK + tl.arange(0, BLOCK)
        inside = (page < pages) & (page <= last)  # no query reads later page ids
        tl.store(
            table + at.to(tl.int64) * pages + page, tl.load(source_table + page, mask=inside, other=0), mask=inside
        )


@triton.jit(do_not_specialize=["rows", "ends", "new", "count"])
def append(tokens, length, rows, ends, new, count, tokens_row, BLOCK: tl.constexpr):
    """Append one token to each row of a block, and write the row's new length."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    end = tl.load(ends + at, mask=inside, other=0)
    token = tl.load(new + at, mask=inside, other=0)
    tl.store(tokens + row * tokens_row + end, token.to(tl.int32), mask=inside)
    tl.store(length + row, end + 1, mask=inside)


class RowKernels(Reference):
    """Implements families.rows.RowKernels. Steps of any spans are placed by the reference."""

    def gather_inputs(self, state: BatchState, inputs: DecodeInputs) -> None:
        groups = [*enumerate(zip(inputs.page_tokens, inputs.tables, inputs.slots, strict=True))]
        for number, (page_tokens, table, slots) in groups:
            _gather_inputs(state, inputs, page_tokens, state.tables[:, number], table, slots)
        if not groups:
            _gather_inputs(state, inputs, 0, state.tokens, inputs.start, inputs.start)

    def append(self, state: BatchState, row: Tensor, end: Tensor, token: Tensor) -> None:
        append[(triton.cdiv(len(row), ROWS),)](
            state.tokens, state.length, row, end, token, len(row), state.tokens.stride(0), BLOCK=ROWS
        )


def _gather_inputs(
    state: BatchState, inputs: DecodeInputs, page_tokens: int, source_table: Tensor, table: Tensor, slots: Tensor
) -> None:
    pages = table.shape[-1]
    gather_inputs[len(inputs.row), triton.cdiv(pages, PAGES) if page_tokens else 1](
        state.tokens,
        state.length,
        source_table,
        inputs.row,
        inputs.bound,
        inputs.position,
        inputs.start,
        inputs.token,
        table,
        slots,
        state.tokens.stride(0),
        source_table.stride(0),
        pages,
        PAGE=page_tokens,
        BLOCK=PAGES,
    )
