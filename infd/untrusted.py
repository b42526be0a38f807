"""Open files that a stranger made.

What lies in a checkpoint's directory need be neither a file nor small: a pipe must
not hang the start, and a size that somebody claims must not be believed for free.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

SMALL_BYTES: Final = 2**26  # config.json and its like; an index of a large model is a few MiB


def read(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """Return what is in a regular file. Raises CheckpointError, for one that is larger too."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > most_bytes:
            raise CheckpointError(f"{path}: {size} bytes; at most {most_bytes} are read")
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> int:
    """Return a descriptor to read a regular file with; the caller closes it. Raises CheckpointError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return descriptor
