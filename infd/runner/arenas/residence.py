"""Release the memory of weights and cache, and restore it at the same addresses.

The cache is restored empty. Weights that a level-1 sleep has parked in host memory are copied back; otherwise the
weights are read from their files again. All methods run on the device thread, between steps.
"""

from __future__ import annotations

import logging
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec import Struct
from msgspec.structs import replace

from infd.errors import DeviceLost, OutOfMemory
from infd.kernels.cpu.fill import native_fill
from infd.memory import ALL, Memory, MemoryPart, Residency
from infd.runner.arenas.host import Collapsing
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import check, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from infd.models.base import Model
    from infd.runner.arenas.arena import Arena, Bank, Parked
    from infd.runner.arenas.weights_source import WeightsSource

log = logging.getLogger("infd.runner")

OFF_DEVICE: Final = frozenset({Residency.RELEASED, Residency.PARKED})


class ModelArenas(Struct, frozen=True):
    """The arenas of a model.

    workspaces  scratch memory of kernels, released and restored together with the cache
    """

    weights: Arena
    cache: Arena
    workspaces: Sequence[Arena]


class Residence:
    """The memory of a model's weights and cache.

    model     the model whose parameters are in `weights`
    weights   the arena of the weights
    cache     the arena of the cache
    memory    residency of weights and cache; may be read on any thread
    refusal   why memory cannot be released; empty if it can
    resident  while memory is released: the bytes that stayed allocated, by use
    quiet     set by the device thread once it has been idle for IDLE_S; cleared at the next message
    stored    number of the checkpoint's encoded matrices, by encoding and form in memory
    """

    def __init__(
        self,
        model: Model,
        bank: Bank,
        arenas: ModelArenas,
        source: WeightsSource,
        report: Callable[[int, int], None],
    ) -> None:
        """Start with all memory loaded.

        bank    the bank of all arenas
        source  the source of the loaded weights
        report  called with (bytes read, bytes to read) while weights are read
        """
        self.model = model
        self.weights = arenas.weights
        self.cache = arenas.cache
        self.memory = Memory()
        self.refusal = bank.sleep_refusal
        self.resident: dict[str, int] = {}
        self.quiet = Event()
        self._bank = bank
        self._cache_arenas = [arenas.cache, *arenas.workspaces]
        self._parked: Parked | None = None
        self._collapsing: Collapsing | None = None
        self._report = report
        self._source = source
        self.stored: Mapping[str, int] = {}

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        """Return the parts that a sleep of this level releases from the device's memory."""
        return ALL if level >= 2 or self._bank.dedicated else frozenset({MemoryPart.CACHE})

    def sleep(self, level: int) -> int:
        """Release the cache, and at level 2 the weights. At level 1, park a GPU's weights in host memory.

        Weights that cannot be parked for lack of host memory are released.
        Returns the bytes freed on the device; for a CPU, the bytes freed in this process.

        Raises OutOfMemory, DeviceLost.
        """
        before = self._bank.held()
        weights = self._park(level)
        # `memory` is set before the release, because content is lost even if the release fails midway.
        self.memory = Memory(weights=weights, cache=Residency.RELEASED)
        self._release_cache()
        if weights in OFF_DEVICE:
            self._stop_collapsing()
            self.weights.release()
        if weights is not Residency.PARKED:
            self._unpark()
        self._bank.trim()
        self.resident = self._bank.resident()
        return max(0, before - self._bank.held())

    def _park(self, level: int) -> Residency:
        """At level 1, park a GPU's loaded weights in host memory. Return the weights' residency during the sleep.

        Returns RELEASED at level 2, and if host memory is short.
        """
        now = self.memory.weights
        if level >= 2:
            return Residency.RELEASED
        if now is not Residency.LOADED or not self._bank.dedicated:
            return now
        self._unpark()
        try:
            if self._parked is not None:
                raise OutOfMemory("the host memory of an earlier sleep could not be freed")
            self._parked = self._bank.park(self.weights, self._beat)
            self._parked.fetch()
        except OutOfMemory as error:
            log.warning("the weights cannot be parked in host memory, so wake reads them from disk: %s", error)
            return Residency.RELEASED
        except BaseException:
            self._unpark()
            raise
        return Residency.PARKED

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Restore `parts`. If CheckpointError, OutOfMemory or DeviceLost is raised, no part is restored."""
        missing = self.memory.released & set(parts)
        try:
            if MemoryPart.CACHE in missing:
                for arena in self._cache_arenas:
                    arena.restore()
            if MemoryPart.WEIGHTS in missing:
                self._wake_weights()
        except BaseException:
            if MemoryPart.CACHE in missing:
                self._release_cache()
            raise
        if MemoryPart.CACHE in missing:
            self.memory = replace(self.memory, cache=Residency.LOADED)
        if self.memory.whole:
            self.resident = {}

    def _wake_weights(self) -> None:
        if self._parked is None or self.memory.weights is not Residency.PARKED:
            self._require_room()
            with Checkpoint(self._source.directory) as checkpoint:
                self._source.require_unchanged(checkpoint)  # only `load` may replace weights
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

    def load(self, path: str, root: str = "") -> None:
        """Replace the weights by those of another checkpoint, whose tensors have equal shapes.

        path, root  see WeightsSource.locate

        If the checkpoint does not match the model, raises CheckpointError before weights are read. If reading fails
        midway, loaded weights become INVALID, and released weights stay released.
        """
        directory = self._source.locate(path, root)
        if self.memory.weights in OFF_DEVICE:
            self._require_room()
        with Checkpoint(directory) as checkpoint:
            self._source.require_same_architecture(checkpoint)
            self._fill(checkpoint)

    def start_collapsing(self) -> None:
        """On a CPU, start to move the weights into large pages, in the background."""
        if self._collapsing is None and not self._bank.dedicated and self.memory.weights is Residency.LOADED:
            self._collapsing = Collapsing(self.weights.collapse, self.quiet)

    def _stop_collapsing(self) -> None:
        """Stop moving the weights into large pages: a move after the release would allocate memory again."""
        if self._collapsing is not None:
            self._collapsing.stop()
            self._collapsing = None

    def facts(self) -> dict[str, Any]:
        """Return facts about weights and memory, for Executor.describe."""
        facts: dict[str, Any] = {"resident": self.resident, "stored": dict(self.stored)}
        if (collapsing := self._collapsing) is not None:
            facts["large_pages"] = {"bytes": self.weights.large, "of": self.weights.used, "ended": collapsing.ended}
        return facts

    def close(self) -> None:
        """Release all memory at shutdown. Failures are logged: a lost device's memory is freed with the process."""
        self._stop_collapsing()
        for release in (self.weights.release, *(arena.release for arena in self._cache_arenas), self._unpark):
            try:
                release()
            except (DeviceLost, OutOfMemory) as error:
                log.warning("memory could not be released: %s", error)

    def _release_cache(self) -> None:
        for arena in self._cache_arenas:
            arena.release()

    def _fill(self, checkpoint: Checkpoint) -> None:
        """Read the weights. If reading fails, loaded weights become INVALID; released weights are released again."""
        places = check(self.model, checkpoint)
        released = self.memory.weights in OFF_DEVICE
        if released:
            self.weights.restore()
        else:
            self.memory = replace(self.memory, weights=Residency.INVALID)
        try:
            with torch.inference_mode():
                self.stored = fill(places, checkpoint, self._report, native_fill())
        except BaseException:
            if released:
                self.weights.release()
            raise
        self._source = self._source.replaced(checkpoint)
        self.memory = replace(self.memory, weights=Residency.LOADED)
        self._unpark()
        self.start_collapsing()

    def _unpark(self) -> None:
        """Free the host memory of parked weights. A failure is logged; the next call tries again."""
        if self._parked is None:
            return
        try:
            self._parked.drop()
            self._parked = None
        except (DeviceLost, OutOfMemory) as error:
            log.warning("the host memory of parked weights could not be freed: %s", error)

    def _beat(self) -> None:
        self._report(0, 0)

    def _require_room(self) -> None:
        needed, free = self.weights.used, self._bank.free()
        if needed > free:
            raise OutOfMemory(
                f"the weights need {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free;"
                " free memory and wake again"
            )
