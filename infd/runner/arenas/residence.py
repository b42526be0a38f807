"""Give the memory of weights and cache back to the system, and take it again at the same addresses.

The cache comes back empty. Weights that a light sleep moved from a GPU to the host come back from there; else they are
read again from where they came. All of it happens on the device thread, between steps.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec.structs import replace

from infd.errors import CheckpointError, DeviceLost, OutOfMemory
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.models.config import architecture
from infd.runner.arenas.host import Settling
from infd.weights.checkpoint import Checkpoint, locate
from infd.weights.load import check, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from infd.models.base import Model
    from infd.runner.arenas.arena import Arena, Bank, Parked

log = logging.getLogger("infd.runner")

GONE: Final = frozenset({Residency.RELEASED, Residency.PARKED})  # from where they are computed with


class Residence:
    """The arenas of a model, and where its weights come from.

    model     its parameters lie in `weights`
    weights   the arena of its weights
    cache     the arena of its cache
    memory    what is there; may be read by any thread
    refusal   why memory cannot be given back here; empty where it can
    resident  what stayed when memory was given back, in bytes by what it is; empty while nothing is given back
    quiet     to be set while nothing is computed
    """

    def __init__(
        self,
        model: Model,
        bank: Bank,
        weights: Arena,
        cache: Arena,
        workspaces: Sequence[Arena],
        root: str,
        report: Callable[[int, int], None],
    ) -> None:
        """Take what was loaded.

        bank        that the arenas are of
        workspaces  that kernels compute in: they go and come with the cache
        root        of other weights, see `load`; empty: the directory in which the first ones' lies
        report      told (bytes read, bytes to read) while weights are read
        """
        self.model = model
        self.weights = weights
        self.cache = cache
        self.memory = Memory()
        self.refusal = bank.sleepless
        self.resident: dict[str, int] = {}
        self.quiet = Event()
        self._bank = bank
        self._emptied = [cache, *workspaces]
        self._parked: Parked | None = None
        self._settling: Settling | None = None
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

    def gives_back(self, level: int) -> frozenset[MemoryPart]:
        """Return what a sleep of that level gives back."""
        return ALL if level >= 2 or self._bank.apart else frozenset({MemoryPart.CACHE})

    def sleep(self, level: int) -> int:
        """Give back the cache, at level 2 the weights too; at level 1 they move to the host where that is elsewhere.

        Returns by how many bytes the device's memory, on a CPU this process, shrank.
        """
        before = self._bank.held()
        weights = self._leaving(level)
        # Said first: what fails midway has lost some of it.
        self.memory = Memory(weights=weights, cache=Residency.RELEASED)
        self._empty()
        if weights in GONE:
            self._unsettle()
            self.weights.release()
        if weights is not Residency.PARKED:
            self._unpark()
        self._bank.trim()
        self.resident = self._bank.resident()
        return max(0, before - self._bank.held())

    def _leaving(self, level: int) -> Residency:
        """Return what the weights are to be in a sleep of that level; park them if that is what it takes."""
        now = self.memory.weights
        if level >= 2:
            return Residency.RELEASED
        if now is not Residency.LOADED or not self._bank.apart:
            return now
        self._unpark()
        try:
            if self._parked is not None:
                raise OutOfMemory("the host could not let go of the last ones")
            self._parked = self._bank.park(self.weights, self._beat)
            self._parked.fetch()
        except OutOfMemory as error:
            log.warning("the weights will be read again on waking, for they cannot be kept: %s", error)
            return Residency.RELEASED
        except BaseException:
            self._unpark()
            raise
        return Residency.PARKED

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Take these back. Raises CheckpointError, OutOfMemory, DeviceLost; then nothing more is held than before."""
        missing = self.memory.released & set(parts)
        try:
            if MemoryPart.CACHE in missing:
                for arena in self._emptied:
                    arena.restore()
            if MemoryPart.WEIGHTS in missing:
                self._wake_weights()
        except BaseException:
            if MemoryPart.CACHE in missing:
                self._empty()
            raise
        if MemoryPart.CACHE in missing:
            self.memory = replace(self.memory, cache=Residency.LOADED)
        if self.memory.whole:
            self.resident = {}

    def _wake_weights(self) -> None:
        if self._parked is None or self.memory.weights is not Residency.PARKED:
            self._require_room()
            with Checkpoint(self._directory) as checkpoint:
                self._require_unchanged(checkpoint)
                self._fill(checkpoint)
            return
        self.weights.restore()
        try:
            self._parked.put_back()
        except BaseException:
            self.weights.release()
            raise
        self.memory = replace(self.memory, weights=Residency.LOADED)
        self._unpark()

    def load(self, path: str) -> None:
        """Put other weights of the same shapes in place.

        path  their directory, beneath the root; or the one that the settings name, wherever that is

        Raises CheckpointError before the first byte has moved where they do not fit; where reading them fails
        midway, the weights are invalid from then on.
        """
        first = self._first.absolute()
        directory = first if Path(path) == first else locate(path, self._root or str(first.parent))
        if self.memory.weights in GONE:
            self._require_room()
        with Checkpoint(directory) as checkpoint:
            if architecture(checkpoint.config) != self._architecture:
                raise CheckpointError(
                    f"{directory}: config.json: architecture {architecture(checkpoint.config)!r}, where"
                    f" {self._architecture!r} is served; another model takes a restart with --model"
                )
            self._fill(checkpoint)

    def settle(self) -> None:
        """Begin to make reading the weights faster, behind everything else."""
        if self._settling is None and not self._bank.apart and self.memory.weights is Residency.LOADED:
            self._settling = Settling(self.weights.settle, self.quiet)

    def _unsettle(self) -> None:
        """Leave the weights' memory alone from now on: what was given back would be had again."""
        if self._settling is not None:
            self._settling.stop()
            self._settling = None

    def facts(self) -> dict[str, Any]:
        """Return what operators are told: see Executor.describe."""
        told: dict[str, Any] = {"resident": self.resident}
        if (settling := self._settling) is not None:
            told["large_pages"] = {"bytes": self.weights.large, "of": self.weights.used, "ended": settling.ended}
        return told

    def close(self) -> None:
        """Give everything back for good; what a lost device does not take back goes with the process."""
        self._unsettle()
        for give in (self.weights.release, *(arena.release for arena in self._emptied), self._unpark):
            try:
                give()
            except (DeviceLost, OutOfMemory) as error:
                log.warning("memory was not given back: %s", error)

    def _empty(self) -> None:
        for arena in self._emptied:
            arena.release()

    def _fill(self, checkpoint: Checkpoint) -> None:
        """Read the weights. If that fails, those that were gone are gone again, and others are invalid."""
        places = check(self.model, checkpoint)
        gone = self.memory.weights in GONE
        if gone:
            self.weights.restore()
        else:
            self.memory = replace(self.memory, weights=Residency.INVALID)
        try:
            with torch.inference_mode():
                fill(places, checkpoint, self._report)
        except BaseException:
            if gone:
                self.weights.release()
            raise
        self.remember(checkpoint)
        self.memory = replace(self.memory, weights=Residency.LOADED)
        self._unpark()
        self.settle()

    def _unpark(self) -> None:
        """Have the host let go of the weights that it holds, if any. Where that fails, it is tried again next time."""
        if self._parked is None:
            return
        try:
            self._parked.drop()
            self._parked = None
        except (DeviceLost, OutOfMemory) as error:
            log.warning("weights that the host held were not given back: %s", error)

    def _beat(self) -> None:
        self._report(0, 0)

    def _require_room(self) -> None:
        needed, free = self.weights.used, self._bank.free()
        if needed > free:
            raise OutOfMemory(
                f"the weights need {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free;"
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
