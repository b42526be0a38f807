"""Read some rows of one matrix of a stored stack of matrices.

Checkpoints store experts one by one, or as one tensor [experts, ...] whose matrices may be transposed, and in which the
rows of two matrices may alternate. Consecutive rows of a matrix are a tensor of their own, which any reader and native
code can read; of other views one matrix is in memory at a time.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from msgspec.structs import replace

from infd.weights.formats.plain import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from infd.groups import GroupedRows, Groups
    from infd.weights.formats.encoded import EncodedReader
    from infd.weights.formats.plain import PlainReader
    from infd.weights.stored import EncodedTensor, StoredTensor


class View(Protocol):
    """See models/parameter.py View."""

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def turned(self) -> bool: ...


def is_slice(view: View) -> bool:
    """Return whether the view's rows are consecutive in the file."""
    return view.step == 1 and not view.turned


def bytes_read(stored: StoredTensor | EncodedTensor, view: View | None) -> int:
    """Return how many bytes of a tensor are read for a view, about; None: for the whole tensor."""
    if view is None:
        return stored.bytes
    experts, rows = stored.shape[0], stored.shape[-1] if view.turned else stored.shape[1]
    return stored.bytes // experts * (view.count if is_slice(view) else rows) // rows


def sliced(stored: StoredTensor, view: View) -> StoredTensor:
    """Return the view's consecutive rows as a tensor."""
    _, rows, *rest = stored.shape
    width = prod(rest) * DTYPES[stored.dtype].itemsize
    offset = stored.offset + (view.index * rows + view.first) * width
    return replace(stored, shape=(view.count, *rest), offset=offset, bytes=view.count * width)


def _chosen(rows: Tensor, view: View, begin: int = 0) -> Tensor:
    """Return the rows of a view among `rows`, which are the matrix's rows from `begin` on."""
    first = view.first if begin <= view.first else begin + (view.first - begin) % view.step
    end = max(0, view.first + view.count * view.step - begin)
    return rows[first - begin : end : view.step]


class PlainView:
    """Reads a view of plain tensors. Has the methods of PlainReader."""

    def __init__(self, reader: PlainReader, view: View) -> None:
        self._reader, self._view = reader, view

    def read(self, stored: StoredTensor, destination: Tensor) -> None:
        """Fill `destination`. Raises CheckpointError if the file was truncated."""
        destination.copy_(self._rows(stored))

    def rows(self, stored: StoredTensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (0, the view's rows, contiguous). Raises CheckpointError if the file was truncated."""
        yield 0, self._rows(stored).contiguous()

    def _rows(self, stored: StoredTensor) -> Tensor:
        _, height, *rest = stored.shape
        whole = replace(self._view, count=height, first=0, step=1, turned=False)  # type: ignore[type-var]
        matrix = torch.empty((height, *rest), dtype=DTYPES[stored.dtype])
        self._reader.read(sliced(stored, whole), matrix)
        return _chosen(matrix.T if self._view.turned else matrix, self._view)


class EncodedView:
    """Reads a view of encoded stacks of matrices, not turned. Has the methods of EncodedReader."""

    def __init__(self, reader: EncodedReader, view: View) -> None:
        assert not view.turned
        self._reader, self._view = reader, view

    def read(self, stored: EncodedTensor, destination: Tensor) -> None:
        """Decode the view into `destination`. Raises CheckpointError."""
        for first, rows in self.rows(stored):
            destination[first : first + len(rows)].copy_(rows)

    def rows(self, stored: EncodedTensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (index among the view's rows, float32 rows). Raises CheckpointError."""
        done, height = 0, stored.shape[1]
        for begin, rows in self._reader.rows(stored, self._view.index * height, height):
            chosen = _chosen(rows, self._view, begin).contiguous()
            yield done, chosen
            done += len(chosen)

    def integers(self, stored: EncodedTensor, form: Groups) -> Iterator[tuple[int, GroupedRows]]:
        """Yield (index among the view's rows, rows that are not decoded). Raises CheckpointError."""
        done, height = 0, stored.shape[1]
        for begin, rows in self._reader.integers(stored, form, self._view.index * height, height):
            by_row = {
                field: _chosen(value, self._view, begin)
                for field, value in rows._asdict().items()
                if value is not None and field != "order"
            }
            yield done, rows._replace(**by_row)
            done += len(by_row["integers"])
