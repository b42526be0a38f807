"""The parts of a model's memory, as types shared by engine, runner and admin; and settings of glibc's allocator."""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Final

from msgspec import Struct


class MemoryPart(Enum):
    """The parts of memory that sleep releases and wake restores. The values are the admin API's `tags`."""

    WEIGHTS = "weights"
    CACHE = "kv_cache"


class Residency(Enum):
    """The state of a part of memory.

    LOADED    usable by steps
    RELEASED  returned to the system; wake reads weights from disk, and allocates an empty cache
    PARKED    copied to host memory and released on the device, until wake
    INVALID   in memory, but unusable, because a load of weights failed midway
    """

    LOADED = "loaded"
    RELEASED = "released"
    PARKED = "parked"
    INVALID = "invalid"


ALL: Final = frozenset(MemoryPart)
M_ARENA_MAX: Final = -8  # from glibc's malloc.h


class Memory(Struct, frozen=True, kw_only=True):
    """The states of weights and cache."""

    weights: Residency = Residency.LOADED
    cache: Residency = Residency.LOADED

    @property
    def released(self) -> frozenset[MemoryPart]:
        """The parts that sleep has released or parked."""
        parts = {MemoryPart.WEIGHTS: self.weights, MemoryPart.CACHE: self.cache}
        return frozenset(part for part, state in parts.items() if state in (Residency.RELEASED, Residency.PARKED))

    @property
    def whole(self) -> bool:
        """Whether steps can run: both parts are LOADED."""
        return self.weights is self.cache is Residency.LOADED


def use_one_heap() -> None:
    """Make all threads allocate from glibc's main heap. Call before the first thread starts.

    Otherwise glibc creates arenas for further threads and does not return their freed memory; up to 30 MiB stayed
    resident after start. Threads seldom contend for the one heap, because the interpreter lock serializes them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # absent from other C libraries
        mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """Return freed heap memory to the system, if the C library supports this (glibc does)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
