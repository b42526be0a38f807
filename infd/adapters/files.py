"""Where an adapter lies, and which directories an operator's request may reach.

An adapter is a directory with two files, as PEFT saves it. What the settings
name may lie anywhere; what is asked for later lies beneath one root, with all
links followed, or it is not opened.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from infd.errors import CheckpointError

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"


class AdapterFiles(Struct, frozen=True):
    """The two files, with links followed. `path` is the directory as it was named."""

    path: str
    config: Path
    tensors: Path

    def stamp(self) -> tuple[object, ...]:
        """Return what changes when a file does. Raises CheckpointError where one is gone."""
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
    if not path or "\0" in path:
        raise CheckpointError(f"{path!r} is not the path of a directory")
    try:
        above = None if root is None else Path(root).resolve(strict=True)
        directory = Path(path) if above is None else above / path
        _require_beneath(above, directory.resolve(), path)  # first: what lies outside is not told apart
        real = directory.resolve(strict=True)
        if not real.is_dir():
            raise CheckpointError(f"{path} is not a directory; an adapter is one with {CONFIG} and {TENSORS}")
        if not (real / TENSORS).exists() and (real / PICKLE).exists():
            raise CheckpointError(
                f"{path}/{PICKLE} is a pickle, which could run anything; infd reads {TENSORS} only:"
                " load the adapter with PEFT and save it again"
            )
        config, tensors = ((real / name).resolve(strict=True) for name in (CONFIG, TENSORS))
    except (OSError, RuntimeError) as error:  # a RuntimeError is a circle of links
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = (isinstance(error, OSError) and error.filename) or path
        raise CheckpointError(f"{where}: {reason}") from error
    for file in (config, tensors):
        _require_beneath(above, file, path)
    return AdapterFiles(path, config, tensors)


def _require_beneath(root: Path | None, real: Path, path: str) -> None:
    if root is not None and not real.is_relative_to(root):
        raise CheckpointError(f"{path} leads out of {root}, beneath which adapters are loaded (lora.root)")


def found(directory: Path) -> list[Path]:
    """Return the adapters that lie side by side in a directory; none where there is no such directory."""
    return sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
