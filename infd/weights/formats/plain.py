"""Read weights stored as floating-point numbers, converting types where needed."""

from __future__ import annotations

import sys
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from infd.weights.stored import ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from infd.weights.stored import StoredTensor

assert sys.byteorder == "little"  # safetensors is little-endian

DTYPES = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
CHUNK_BYTES = 2**24  # size of the staging buffer, and bytes between calls of `progress`; a multiple of every item size


class PlainReader:
    """A reader of stored tensors.

    If the destination is in CPU memory and has the stored type, bytes are read directly
    into it. Other destinations are filled through a staging buffer of CHUNK_BYTES, which
    is pinned if the destination is on a GPU.
    """

    def __init__(self, progress: Callable[[int], None]) -> None:
        """`progress` is called after each chunk, with the number of bytes read."""
        self._progress = progress
        self._staging: Tensor | None = None

    def read(self, stored: StoredTensor, destination: Tensor) -> None:
        """Fill `destination`, which is contiguous and has the stored tensor's shape.

        Raises CheckpointError if the file was truncated.
        """
        flat, dtype = destination.view(-1), DTYPES[stored.dtype]
        direct = flat.dtype == dtype and flat.device.type == "cpu"
        for start in range(0, stored.bytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, stored.bytes - start)
            items = flat[start // dtype.itemsize : (start + count) // dtype.itemsize]
            target = items.view(torch.uint8) if direct else self._stage(items.is_cuda)[:count]
            stored.read(target.numpy().data, start)
            if not direct:
                items.copy_(target.view(dtype))
            self._progress(count)

    def rows(self, stored: StoredTensor) -> Iterator[tuple[int, Tensor]]:
        """Yield a matrix in chunks: (index of the first row, [rows, ...] in the stored type).

        A chunk is valid until the next chunk is requested. Raises CheckpointError if the file was truncated.
        """
        dtype = DTYPES[stored.dtype]
        count, *shape = stored.shape or (1,)
        width = prod(shape) * dtype.itemsize
        most = max(ROWS, CHUNK_BYTES // max(width, 1) // ROWS * ROWS)
        buffer = torch.empty(min(most, count) * width, dtype=torch.uint8)
        for first in range(0, count, most):
            chunk = buffer[: min(most, count - first) * width]
            stored.read(chunk.numpy().data, first * width)
            yield first, chunk.view(dtype).view(-1, *shape)
            self._progress(chunk.nbytes)

    def _stage(self, pinned: bool) -> Tensor:
        if self._staging is None or self._staging.is_pinned() != pinned:
            self._staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._staging
