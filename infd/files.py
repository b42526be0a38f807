"""Replace files: a reader, and a disk that is full, find the old content or the new one, never a part."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def replace(path: str | Path, content: bytes) -> None:
    """Write a file whole, or leave it as it was. Processes may do so at once: the last one wins. Raises OSError."""
    partial = f"{path}.{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
