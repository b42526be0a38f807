"""The lines that somebody typed, from one conversation to the next. They are nobody else's to read."""

from __future__ import annotations

import contextlib
import os
import readline
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINES: Final = 1000


@contextlib.contextmanager
def remembered(file: Path | None) -> Iterator[None]:
    """Let input() know the lines of `file` while the block is open, and add those typed meanwhile.

    A file that cannot be read or written is done without: it is a convenience.
    """
    readline.parse_and_bind("tab: self-insert")  # what is typed here are words, not the names of files
    readline.set_history_length(LINES)
    if file is None:
        yield
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        file.chmod(0o600)
        readline.read_history_file(file)
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.append_history_file(max(0, readline.get_current_history_length() - known), file)
