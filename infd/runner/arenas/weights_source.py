"""The checkpoint from which a model's weights were read, and the directory that other checkpoints must be in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct
from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.models.config import architecture
from infd.weights.checkpoint import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.checkpoint import Checkpoint


class WeightsSource(Struct, frozen=True):
    """The checkpoint of the current weights, and the directories that `locate` accepts.

    directory   the checkpoint's directory
    config      content of config.json
    stamps      see Checkpoint.stamps
    configured  absolute path of the directory in the settings
    """

    directory: Path
    config: Mapping[str, Any]
    stamps: Mapping[str, tuple[int, int]]
    configured: Path

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Return the source of weights that were read from the configured checkpoint."""
        return cls(checkpoint.directory, checkpoint.config, checkpoint.stamps(), checkpoint.directory.absolute())

    def replaced(self, checkpoint: Checkpoint) -> Self:
        """Return the source of weights that were read from another checkpoint."""
        return replace(self, directory=checkpoint.directory, config=checkpoint.config, stamps=checkpoint.stamps())

    def locate(self, path: str, root: str) -> Path:
        """Return the directory of the checkpoint at `path`: the configured directory, or one below `root`.

        root  directory that must contain every other checkpoint; empty: the configured checkpoint's parent

        Raises CheckpointError for any other path.
        """
        return self.configured if Path(path) == self.configured else locate(path, root or str(self.configured.parent))

    def require_same_architecture(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a checkpoint's architecture differs from the served architecture."""
        found, served = architecture(checkpoint.config), architecture(self.config)
        if found != served:
            raise CheckpointError(
                f"{checkpoint.directory}: config.json: architecture {found!r}, where {served!r} is served;"
                " another model takes a restart with --model"
            )

    def require_unchanged(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if a file of the checkpoint changed since the weights were read."""
        found = checkpoint.stamps()
        changed = sorted(name for name in found.keys() | self.stamps.keys() if found.get(name) != self.stamps.get(name))
        if changed:
            raise CheckpointError(
                f"{checkpoint.directory}: {', '.join(changed)} changed since the weights were loaded; restore the files"
                f" and wake again, or load the new weights with `infdctl load-weights {checkpoint.directory}`"
            )
