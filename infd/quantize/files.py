"""Write a directory of safetensors files, which becomes visible only when it is complete and synced."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from infd.errors import OutputFailed, UsageError
from infd.rounding import round_up
from infd.weights.checkpoint import BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType


class Entry(NamedTuple):
    """A tensor to write. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


def require_absent(path: Path) -> None:
    """Raise UsageError if `path` exists."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; name a directory that does not")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` when the block ends, and is removed if the block raises.

    Raises UsageError if `path` exists, OutputFailed if it cannot be written.
    """
    require_absent(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        try:
            yield partial
            for each in (partial, *partial.rglob("*")):
                _sync(each)
            partial.rename(path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written: {error.strerror or error}") from error


class SafetensorsWriter:
    """A safetensors file whose tensors are written in any order, in parts; and a context manager that closes it."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        """Write the header, and allocate the file's bytes on the disk. Raises OSError, for example if it is full."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        offset = 0
        for entry in entries:
            self._offsets[entry.name], end = offset, offset + entry.bytes
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (offset, end)}
            offset = end
        text = msgspec.json.encode(header)
        text = text.ljust(round_up(len(text), 8))
        self._first = 8 + len(text)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(self._descriptor, 0, self._first + offset)
            self._write(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def write(self, name: str, content: bytes | memoryview, start: int = 0) -> None:
        """Write bytes of a tensor, from byte `start` on. Raises OSError."""
        self._write(content, self._first + self._offsets[name] + start)

    def _write(self, content: bytes | memoryview, offset: int) -> None:
        rest = memoryview(content)
        while rest:
            count = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[count:], offset + count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
