"""The persistent batch in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.rows import Kept, Seats


class Rows:
    """The rows family."""

    def seat(self, kept: Kept, seats: Seats) -> None:
        row, position = seats.row, seats.position
        torch.minimum(seats.bound, kept.length.index_select(0, row) - 1, out=position)
        seats.start.copy_(position)
        seats.token.copy_(kept.tokens[row, position])
        groups = zip(seats.page_tokens, seats.tables, seats.slots, strict=True)
        for number, (size, table, slots) in enumerate(groups):
            torch.index_select(kept.tables[:, number], 0, row, out=table)
            page = table.gather(1, (position // size)[:, None])[:, 0].to(torch.int64)
            torch.add(page * size, position % size, out=slots)

    def append(self, kept: Kept, row: Tensor, end: Tensor, token: Tensor) -> None:
        kept.tokens.index_put_((row, end), token.to(torch.int32))
        kept.length.index_copy_(0, row, end + 1)
