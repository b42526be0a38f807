"""Read encoded matrices: decode them to float32, or return their integers and scales unchanged."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from infd.weights.encodings.integers import integers_of, widened
from infd.weights.encodings.rows import DTYPES, rows_of
from infd.weights.formats.plain import CHUNK_BYTES
from infd.weights.stored import ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from infd.groups import GroupedRows, Groups
    from infd.weights.encodings.rows import Rows
    from infd.weights.stored import EncodedTensor

T = TypeVar("T")


class EncodedReader:
    """A reader of encoded matrices, with the methods of PlainReader.

    Memory: the stored tensors of one matrix, and about three chunks of CHUNK_BYTES.
    """

    def __init__(self, progress: Callable[[int], None]) -> None:
        """`progress` is called with a matrix's bytes once they are read, then with 0 after each computed chunk."""
        self._progress = progress
        self._opened: tuple[EncodedTensor, Groups | None, Any] | None = None  # the tensor read last, and its rows

    def read(self, stored: EncodedTensor, destination: Tensor) -> None:
        """Decode a matrix into `destination`, which has the matrix's shape. Raises CheckpointError."""
        rows = destination.view(-1, stored.shape[-1])
        for first, chunk in self.rows(stored):
            rows[first : first + len(chunk)].copy_(chunk)

    def rows(self, stored: EncodedTensor, begin: int = 0, count: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Decode `count` rows from row `begin` on, or all: yield (index of the first row, float32 [rows, inputs]).

        Indices count from `begin`. Raises CheckpointError.
        """
        compute: Rows = self._open(stored, None, lambda: rows_of(stored.encoding))
        for first, size in _chunks(stored, count):
            yield first, compute(begin + first, size)
            self._progress(0)

    def integers(
        self, stored: EncodedTensor, form: Groups, begin: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, GroupedRows]]:
        """Like `rows`, but yield rows that are not decoded, with scales and minima in the form's dtype.

        `why_not` must have returned "". Raises CheckpointError.
        """
        packed = stored.packed()
        assert not isinstance(packed, str)
        dtype = DTYPES[form.scales]
        compute = self._open(stored, form, lambda: integers_of(stored.encoding, form.inputs))
        for first, size in _chunks(stored, count):
            rows = widened(compute(begin + first, size), packed, form)
            minima = None if rows.minima is None else rows.minima.to(dtype)
            yield first, rows._replace(scales=rows.scales.to(dtype), minima=minima)
            self._progress(0)

    def _open(self, stored: EncodedTensor, form: Groups | None, read: Callable[[], T]) -> T:
        """Return what `read` returns; the tensor read last is not read again, so that its views share its memory."""
        if self._opened is None or self._opened[0] is not stored or self._opened[1] != form:
            self._opened = None
            self._opened = stored, form, read()
            self._progress(stored.bytes)
        found: T = self._opened[2]
        return found


def _chunks(stored: EncodedTensor, rows: int | None) -> Iterator[tuple[int, int]]:
    """Yield (index of the first row, number of rows) of each chunk. rows: None: all."""
    count = prod(stored.shape[:-1]) if rows is None else rows
    most = max(ROWS, CHUNK_BYTES // (stored.shape[-1] * 4) // ROWS * ROWS)
    for first in range(0, count, most):
        yield first, min(most, count - first)
