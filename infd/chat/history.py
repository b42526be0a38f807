"""The history of typed lines, kept between conversations in a file that only the user can read."""

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
def input_history(file: Path | None) -> Iterator[None]:
    """Load `file` as the history of input() within this block, and append the lines typed in the block to the file.

    Errors in reading or writing the file are ignored, because a conversation needs no history.
    """
    readline.parse_and_bind("tab: self-insert")  # by default Tab completes file names
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
