"""The persistent batch: what is kept of each sequence on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Kept(NamedTuple):
    """What is kept of sequences on the device, a row each.

    tokens  [R, L] int32: every known token
    length  [R] int64: how many are known, at least 1
    tables  [R, groups, pages] int32: page ids by group and page index
    """

    tokens: Tensor
    length: Tensor
    tables: Tensor


class Seats(NamedTuple):
    """What a step reads in which each of N rows computes its last token. Its tensors stay where they are.

    row, bound       [N] int64: given; the position of a row's token is at most its bound
    position, token  [N] int64
    start            [N] int32: the position again
    page_tokens      by page group
    tables           by page group, [N, pages] int32: as far as the row has tokens
    slots            by page group, [N] int64: page * page_tokens + offset of the token
    """

    row: Tensor
    bound: Tensor
    position: Tensor
    start: Tensor
    token: Tensor
    page_tokens: Sequence[int]
    tables: Sequence[Tensor]
    slots: Sequence[Tensor]


class RowKernels(Protocol):
    """Reads and writes what is kept, where only the device knows how far a sequence has come."""

    def seat(self, kept: Kept, seats: Seats) -> None:
        """Put in place what a step reads."""

    def append(self, kept: Kept, row: Tensor, end: Tensor, token: Tensor) -> None:
        """Write the tokens sampled for some rows, each at position `end`; all three [N] int64.

        What a row keeps that is named twice is undefined: only padding's is.
        """
