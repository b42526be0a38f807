"""Split tensors into parts that native code reads to their destinations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from infd.weights.stored import StoredTensor

PART_BYTES: Final = 2**19  # bytes of a part; a part that is read and packed must fit a core's cache


class Packing(Protocol):
    """The members of `kernels.families.matrices.Packing` that this module uses."""

    @property
    def pack(self) -> int: ...
    @property
    def place(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def step(self) -> int: ...


class FilePart(NamedTuple):
    """Bytes of a file and their destination.

    file    file descriptor
    offset  of the first byte, from the start of the file
    pack    address of a function that packs [rows, inputs] into the matrix [outputs, inputs] at address `place`,
            starting at row `first`; None: the bytes are copied to address `place`
    head    rows of a head in which the rows of its two halves alternate; 0: rows are in the matrix's order
    """

    file: int
    offset: int
    bytes: int
    pack: int | None
    place: int
    outputs: int = 0
    inputs: int = 0
    first: int = 0
    rows: int = 0
    head: int = 0


class Fill(Protocol):
    """Native code that reads parts to their destinations."""

    def __call__(self, parts: Sequence[FilePart], report: Callable[[int], None]) -> int | None:
        """Read all parts. Return the index of a part whose file ends early, or None.

        report  called with the number of bytes read since the last call, at least every second

        Raises OSError.
        """


def copied(stored: StoredTensor, rows: Tensor) -> Iterator[FilePart]:
    """Yield the parts of a tensor that is copied to `rows`, which is contiguous and has as many bytes as the tensor."""
    for start in range(0, stored.bytes, PART_BYTES):
        size = min(PART_BYTES, stored.bytes - start)
        yield FilePart(stored.file.descriptor, stored.offset + start, size, None, rows.data_ptr() + start)


def packed(stored: StoredTensor, packing: Packing, first: int, head: int = 0) -> Iterator[FilePart]:
    """Yield the parts of a matrix [n, inputs] that is packed into its destination, starting at row `first`.

    head  see FilePart
    """
    count = stored.shape[0]
    width = stored.bytes // max(count, 1)
    step, ahead = (head, 0) if head else (packing.step, first)
    most = max(1, PART_BYTES // max(width * step, 1)) * step
    row = 0
    while row < count:
        # All parts but the first begin at a multiple of `step`: of the destination's rows, or of whole heads.
        rows = min(most - (ahead + row) % step, count - row)
        yield FilePart(
            stored.file.descriptor,
            stored.offset + row * width,
            rows * width,
            packing.pack,
            packing.place,
            packing.outputs,
            packing.inputs,
            first + row,
            rows,
            head,
        )
        row += rows
