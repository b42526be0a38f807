"""Locate an adapter's files, and confine adapters that operators load at run time to one directory.

An adapter is a directory with two files, as PEFT saves it. Adapters named in the
settings may be anywhere; adapters named by `infdctl load-lora` must be beneath
lora.root after symbolic links are resolved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import CheckpointError
from infd.untrusted import Root

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


class AdapterFiles(Struct, frozen=True):
    """An adapter's two files, with symbolic links resolved. `path` is the directory before links are resolved."""

    path: str
    config: Path
    tensors: Path

    def stamp(self) -> tuple[tuple[int, ...], ...]:
        """Return device, inode, size and mtime of both files. Raises CheckpointError if a file is missing."""
        try:
            found = [file.stat() for file in (self.config, self.tensors)]
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)


def locate(path: str, root: str | None = None) -> AdapterFiles:
    """Return the files of the adapter in directory `path`.

    root  directory that must contain the files; a relative `path` is relative to it. None: any directory may contain
          the files

    Raises CheckpointError.
    """
    within = Root(root, "lora.root")
    real = within.find(path)
    config = within.follow(real / CONFIG, path)
    if not (real / TENSORS).exists() and (real / PICKLE).exists():
        raise CheckpointError(
            f"{path}/{PICKLE} is a pickle, which could run anything; infd reads {TENSORS} only:"
            " load the adapter with PEFT and save it again"
        )
    return AdapterFiles(path, config, within.follow(real / TENSORS, path))
