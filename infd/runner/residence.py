"""Give the memory of weights and cache back to the system, and take it again at the same addresses.

The cache comes back empty, the weights are read again from where they came.
All of it happens on the device thread, between steps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from infd.errors import CheckpointError, OutOfMemory
from infd.memory import Held, Memory, Part, trim
from infd.models.config import architecture
from infd.runner.memory import available_bytes
from infd.weights.checkpoint import Checkpoint, locate
from infd.weights.load import check, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from infd.models.base import Model
    from infd.runner.memory import Arena

STATM = Path("/proc/self/statm")


class Residence:
    """The arenas of a model, and where its weights come from.

    memory   what is there; may be read by any thread
    refusal  why memory cannot be given back here; empty where it can
    """

    def __init__(
        self,
        model: Model,
        weights: Arena,
        cache: Arena,
        device: torch.device,
        root: str,
        report: Callable[[int, int], None],
    ) -> None:
        """Take what was loaded.

        root    of other weights, see `load`; empty: the directory in which the first ones' lies
        report  told (bytes read, bytes to read) while weights are read
        """
        self.memory = Memory()
        self.refusal = "" if weights.releasable and cache.releasable else f"memory of {device} is not given back yet"
        self._model = model
        self._weights = weights
        self._cache = cache
        self._device = device
        self._report = report
        self._root = root
        self._first = self._directory = Path()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._architecture = ""

    def remember(self, checkpoint: Checkpoint) -> None:
        """The weights are of this checkpoint."""
        if not self._stamps:
            self._first = checkpoint.directory
        self._directory, self._stamps = checkpoint.directory, checkpoint.stamps()
        self._architecture = architecture(checkpoint.config)

    def sleep(self, level: int) -> int:
        """Give back the cache, at level 2 the weights too; return by how many bytes the process shrank."""
        before = _resident_bytes()
        # Said first: what fails midway has lost some of it.
        self.memory = replace(self.memory, cache=Held.RELEASED)
        self._cache.release()
        if level >= 2:
            self.memory = replace(self.memory, weights=Held.RELEASED)
            self._weights.release()
        trim()
        return max(0, before - _resident_bytes())

    def wake(self, parts: Collection[Part]) -> None:
        """Take these back. Raises CheckpointError, OutOfMemory; then nothing more is held than before."""
        if Part.WEIGHTS in parts and self.memory.weights is Held.RELEASED:
            self._require_room()
            with Checkpoint(self._directory) as checkpoint:
                self._require_unchanged(checkpoint)
                self._fill(checkpoint, Held.RELEASED)
        if Part.CACHE in parts:
            self.memory = replace(self.memory, cache=Held.LOADED)

    def load(self, path: str) -> None:
        """Put other weights of the same shapes in place.

        path  their directory, beneath the root; or the one that the settings name, wherever that is

        Raises CheckpointError before the first byte has moved where they do not fit; where reading them fails
        midway, the weights are invalid from then on.
        """
        first = self._first.absolute()
        directory = first if Path(path) == first else locate(path, self._root or str(first.parent))
        if self.memory.weights is Held.RELEASED:
            self._require_room()
        with Checkpoint(directory) as checkpoint:
            if architecture(checkpoint.config) != self._architecture:
                raise CheckpointError(
                    f"{directory}: config.json: architecture {architecture(checkpoint.config)!r}, where"
                    f" {self._architecture!r} is served; another model takes a restart with --model"
                )
            self._fill(checkpoint, Held.RELEASED if self.memory.weights is Held.RELEASED else Held.INVALID)

    def settle(self) -> bool:
        """Use a moment in which nothing is computed to make reading the weights faster; return whether to go on."""
        return self.memory.weights is Held.LOADED and self._weights.settle()

    def close(self) -> None:
        """Give everything back for good."""
        self._weights.release()
        self._cache.release()

    def _fill(self, checkpoint: Checkpoint, failed: Held) -> None:
        """Read the weights. `failed`: what they are if that fails; released ones are given back."""
        places = check(self._model, checkpoint)
        self.memory = replace(self.memory, weights=failed)
        try:
            with torch.inference_mode():
                fill(places, checkpoint, self._report)
        except BaseException:
            if failed is Held.RELEASED:
                self._weights.release()
            raise
        self.remember(checkpoint)
        self.memory = replace(self.memory, weights=Held.LOADED)

    def _require_room(self) -> None:
        needed, free = self._weights.used, available_bytes(self._device)
        if needed > free:
            raise OutOfMemory(
                f"the weights need {needed / 2**20:,.0f} MiB on {self._device}, {free / 2**20:,.0f} MiB are free;"
                " make room and wake again"
            )

    def _require_unchanged(self, checkpoint: Checkpoint) -> None:
        """The same shapes may hold other weights; nobody has asked for those."""
        found = checkpoint.stamps()
        changed = sorted(
            name for name in found.keys() | self._stamps.keys() if found.get(name) != self._stamps.get(name)
        )
        if changed:
            raise CheckpointError(
                f"{checkpoint.directory}: {', '.join(changed)} changed since the weights were loaded; put the old files"
                f" back and wake again, or take the new ones with `infdctl load-weights {checkpoint.directory}`"
            )


def _resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
