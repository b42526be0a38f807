"""Weights stored as ordinary floating-point numbers, read as they are or converted on the way."""

from __future__ import annotations

import sys
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from infd.weights.checkpoint import StoredTensor

assert sys.byteorder == "little"  # as safetensors stores numbers

DTYPES = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
ROWS = 64  # where a part begins: forms that keep rows in blocks have no larger ones
CHUNK_BYTES = 2**24  # between two reports of progress, and the size of the staging buffer; a multiple of every item


class PlainReader:
    """Reads stored tensors into place.

    Where type and device agree the file's bytes land in the destination itself;
    otherwise they pass through one small buffer, pinned when the destination is
    a GPU's.
    """

    def __init__(self, progress: Callable[[int], None]) -> None:
        """Report to `progress` the bytes just read."""
        self._progress = progress
        self._staging: Tensor | None = None

    def read(self, stored: StoredTensor, destination: Tensor) -> None:
        """Fill `destination`, contiguous and of the stored tensor's shape."""
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
        """Yield a matrix part by part: the first row, and rows of the stored type, valid until the next part."""
        dtype = DTYPES[stored.dtype]
        count, *shape = stored.shape or (1,)
        width = prod(shape) * dtype.itemsize
        most = max(ROWS, CHUNK_BYTES // max(width, 1) // ROWS * ROWS)
        buffer = torch.empty(min(most, count) * width, dtype=torch.uint8)
        for first in range(0, count, most):
            part = buffer[: min(most, count - first) * width]
            stored.read(part.numpy().data, first * width)
            yield first, part.view(dtype).view(-1, *shape)
            self._progress(part.nbytes)

    def _stage(self, pinned: bool) -> Tensor:
        if self._staging is None or self._staging.is_pinned() != pinned:
            self._staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._staging
