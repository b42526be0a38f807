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


class RowKernels(Protocol):
    """Reads and writes of the persistent batch that depend on lengths known only to the device."""

    def gather_inputs(self, state: BatchState, inputs: DecodeInputs) -> None:
        """Fill `inputs` for the next step."""

    def append(self, state: BatchState, row: Tensor, end: Tensor, token: Tensor) -> None:
        """Append sampled tokens to rows, each at position `end`; row, end, token [N] int64.

        Only the padding row may occur twice; its content is then undefined.
        """
