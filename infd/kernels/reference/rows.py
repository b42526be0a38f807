"""The persistent batch in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.families.rows import TokenPlaces

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.rows import BatchState, DecodeInputs


class RowKernels:
    """Implements families.rows.RowKernels."""

    def place_tokens(self, state: BatchState, row: Tensor, bound: Tensor, span: Tensor, offset: Tensor) -> TokenPlaces:
        start = torch.minimum(bound, state.length[row] - 1)
        token_row, position = row[span], start[span] + offset
        token = state.tokens[token_row, position].to(torch.int64)
        return TokenPlaces(start.to(torch.int32), token_row, position, token)

    def place_pages(
        self, table: Tensor, row: Tensor, pages: int, token_row: Tensor, position: Tensor, page_tokens: int
    ) -> tuple[Tensor, Tensor]:
        page = table[token_row, position // page_tokens].to(torch.int64)
        return table[:, :pages].index_select(0, row), page * page_tokens + position % page_tokens

    def gather_inputs(self, state: BatchState, inputs: DecodeInputs) -> None:
        row, position = inputs.row, inputs.position
        torch.minimum(inputs.bound, state.length.index_select(0, row) - 1, out=position)
        inputs.start.copy_(position)
        inputs.token.copy_(state.tokens[row, position])
        groups = zip(inputs.page_tokens, inputs.tables, inputs.slots, strict=True)
        for number, (size, table, slots) in enumerate(groups):
            torch.index_select(state.tables[:, number], 0, row, out=table)
            page = table.gather(1, (position // size)[:, None])[:, 0].to(torch.int64)
            torch.add(page * size, position % size, out=slots)

    def append(self, state: BatchState, row: Tensor, end: Tensor, token: Tensor) -> None:
        state.tokens.index_put_((row, end), token.to(torch.int32))
        state.length.index_copy_(0, row, end + 1)
