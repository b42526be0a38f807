"""Fetch models of ModelScope through the `modelscope` library, which the user must install."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError, ConfigError, FetchFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.hub.fetch import Progress


class ModelScope:
    """One model of the hub."""

    def __init__(self, name: str, revision: str | None) -> None:
        """Import the library. Raises ConfigError if the library is not installed."""
        self._name = name
        self._revision = revision
        self._directory: Path | None = None
        try:
            self._library: Any = import_module("modelscope")
        except ImportError as error:
            raise ConfigError(
                f"model.hub is 'modelscope', which needs its package: pip install modelscope ({error})"
            ) from error

    def snapshot(self, patterns: Sequence[str], progress: Progress | None = None) -> Path:
        callbacks = [] if progress is None else [_counting(progress)]
        try:
            self._directory = Path(
                self._library.snapshot_download(
                    self._name, revision=self._revision, allow_patterns=list(patterns), progress_callbacks=callbacks
                )
            )
        except OSError as error:
            raise FetchFailed(f"{self._name} cannot be fetched from ModelScope: {error}") from error
        except Exception as error:  # the library's other errors have no common base class
            raise CheckpointError(f"{self._name} cannot be fetched from ModelScope: {error}") from error
        return self._directory

    def listing(self) -> list[str]:
        directory = self._directory
        if directory is None:
            return []
        return [str(path.relative_to(directory)) for path in sorted(directory.rglob("*")) if path.is_file()]


def _counting(progress: Progress) -> type[Any]:
    """Return a callback class that reports to `progress`. The library creates one instance per file, on any thread."""
    lock = Lock()
    done = total = 0

    class Counting:
        def __init__(self, filename: str, file_size: int) -> None:
            nonlocal total
            with lock:
                total += file_size

        def update(self, size: int) -> None:
            nonlocal done
            with lock:
                done += size
                progress(done, total)

        def end(self) -> None:
            """Called when the file is complete."""

    return Counting
