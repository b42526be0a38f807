"""Where an adapter lies, and which directories an operator's request may reach.

An adapter is a directory with two files, as PEFT saves it. What the settings
name may lie anywhere; what is asked for later lies beneath one root, with all
links followed, or it is not opened.
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
    """The two files, with links followed. `path` is the directory as it was named."""

    path: str
    config: Path
    tensors: Path

    def stamp(self) -> tuple[tuple[int, ...], ...]:
        """Return numbers that differ once a file has changed. Raises CheckpointError where one is gone."""
        try:
            found = [file.stat() for file in (self.config, self.tensors)]
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from error
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)


def locate(path: str, root: str | None = None) -> AdapterFiles:
    """Find an adapter's files.

    root  the directory that must hold them, in which a relative `path` begins; None: they may lie anywhere

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


def found(directory: Path) -> list[Path]:
    """Return the adapters that lie side by side in a directory; none where there is no such directory."""
    return sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
