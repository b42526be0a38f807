"""Open files that a stranger made, from where strangers may name them.

What lies in a checkpoint's directory need be neither a file nor small: a pipe must
not hang the start, and a size that somebody claims must not be believed for free.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from infd.errors import CheckpointError

SMALL_BYTES: Final = 2**26  # config.json and its like; an index of a large model is a few MiB


class Root:
    """What holds all that operators may name while the daemon runs, with all links followed."""

    def __init__(self, path: str | None, setting: str) -> None:
        """Let a directory, or None: all there is, be the limit; `setting` is where it is chosen."""
        self._path = path
        self._setting = setting

    def find(self, said: str) -> Path:
        """Return where the directory really is that somebody names; a relative name begins in the root.

        Raises CheckpointError.
        """
        if not said or "\0" in said:
            raise CheckpointError(f"{said!r} is not the path of a directory")
        named = Path(said) if self._path is None else _real(Path(self._path)) / said
        self._require(_real(named, strict=False), said)  # first: what lies outside is not told apart
        real = _real(named)
        if not real.is_dir():
            raise CheckpointError(f"{said} is not a directory")
        return real

    def follow(self, file: Path, said: str) -> Path:
        """Return where a file in the directory named so really is. Raises CheckpointError."""
        real = _real(file)
        self._require(real, said)
        return real

    def _require(self, real: Path, said: str) -> None:
        if self._path is not None and not real.is_relative_to(above := _real(Path(self._path))):
            raise CheckpointError(
                f"{said} leads out of {above}, beneath which such files are loaded: put it there, or start infd with"
                f" another {self._setting}"
            )


def _real(path: Path, *, strict: bool = True) -> Path:
    try:
        return path.resolve(strict=strict)
    except (OSError, RuntimeError) as error:  # a RuntimeError is a circle of links
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = (isinstance(error, OSError) and error.filename) or path
        raise CheckpointError(f"{where}: {reason}") from error


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
