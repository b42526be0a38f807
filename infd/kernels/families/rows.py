"""The persistent batch: the state of each running sequence on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class BatchState(NamedTuple):
    """The persistent batch, one row per sequence.

    tokens  [R, L] int32: every known token
    length  [R] int64: number of known tokens, at least 1
    tables  [R, groups, pages] int32: page ids by group and page index
    """

    tokens: Tensor
    length: Tensor
    tables: Tensor


class DecodeInputs(NamedTuple):
    """The inputs of a step in which each of N rows computes its last known token. The tensors have fixed addresses.

    row, bound       [N] int64: set by the host; bound is an upper bound of the token's position
    position, token  [N] int64: gathered
    start            [N] int32: the position
    page_tokens      by page group
    tables           by page group, [N, pages] int32: page ids, valid up to the token's page
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


class TokenPlaces(NamedTuple):
    """The places of a step's T tokens, in S spans.

    start          [S] int32: position of each span's first token
    row, position  [T] int64: of each token
    token          [T] int64
    """

    start: Tensor
    row: Tensor
    position: Tensor
    token: Tensor


class RowKernels(Protocol):
    """Reads and writes of the persistent batch that depend on lengths known only to the device.

    All tensors of one dimension are contiguous.
    """

    def place_tokens(self, state: BatchState, row: Tensor, bound: Tensor, span: Tensor, offset: Tensor) -> TokenPlaces:
        """Locate a step's tokens.

        row, bound    [S] int64: row of each span, and an upper bound of its first token's position
        span, offset  [T] int64: span of each token, and its distance from the span's first token
        """

    def place_pages(
        self, table: Tensor, row: Tensor, pages: int, token_row: Tensor, position: Tensor, page_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Return the pages of spans, and the slots of tokens, in one page group.

        table                [R, pages] int32: the group's part of BatchState.tables
        row                  [S] int64: row of each span
        pages                number of pages to return of each row
        token_row, position  [T] int64
        ->                   [S, pages] int32; [T] int64: page * page_tokens + offset
        """

    def gather_inputs(self, state: BatchState, inputs: DecodeInputs) -> None:
        """Fill `inputs` for the next step."""

    def append(self, state: BatchState, row: Tensor, end: Tensor, token: Tensor) -> None:
        """Append sampled tokens to rows, each at position `end`; row, end, token [N] int64.

        Only the padding row may occur twice; its content is then undefined.
        """
