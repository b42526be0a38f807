"""The persistent batch in C++: `native/rows.cpp`. One call replaces a dozen of torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library
from infd.kernels.families.rows import TokenPlaces
from infd.kernels.reference.rows import RowKernels as Reference

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.rows import BatchState


class RowKernels(Reference):
    """Implements families.rows.RowKernels. Only captured steps need `gather_inputs`, which remains the reference's."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        five = (POINTER,) * 5
        self._place_tokens = library.kernel("place_tokens", POINTER, INT, *five[:3], INT, *five[:2], INT, *five[:4])
        self._place_pages = library.kernel(
            "place_pages", POINTER, INT, POINTER, INT, INT, POINTER, POINTER, INT, INT, POINTER, POINTER
        )
        self._append = library.kernel("append_tokens", POINTER, INT, *five[:4], INT)

    def place_tokens(self, state: BatchState, row: Tensor, bound: Tensor, span: Tensor, offset: Tensor) -> TokenPlaces:
        spans, count = len(row), len(span)
        start = torch.empty(spans, dtype=torch.int32)
        token_row, position, token = torch.empty((3, count), dtype=torch.int64)
        self._place_tokens(
            state.tokens.data_ptr(),
            state.tokens.stride(0),
            state.length.data_ptr(),
            row.data_ptr(),
            bound.data_ptr(),
            spans,
            span.data_ptr(),
            offset.data_ptr(),
            count,
            start.data_ptr(),
            token_row.data_ptr(),
            position.data_ptr(),
            token.data_ptr(),
        )
        return TokenPlaces(start, token_row, position, token)

    def place_pages(
        self, table: Tensor, row: Tensor, pages: int, token_row: Tensor, position: Tensor, page_tokens: int
    ) -> tuple[Tensor, Tensor]:
        spans, count = len(row), len(position)
        first, slots = torch.empty((spans, pages), dtype=torch.int32), torch.empty(count, dtype=torch.int64)
        self._place_pages(
            table.data_ptr(),
            table.stride(0),
            row.data_ptr(),
            spans,
            pages,
            token_row.data_ptr(),
            position.data_ptr(),
            count,
            page_tokens,
            first.data_ptr(),
            slots.data_ptr(),
        )
        return first, slots

    def append(self, state: BatchState, row: Tensor, end: Tensor, token: Tensor) -> None:
        self._append(
            state.tokens.data_ptr(),
            state.tokens.stride(0),
            state.length.data_ptr(),
            row.data_ptr(),
            end.data_ptr(),
            token.data_ptr(),
            len(row),
        )
