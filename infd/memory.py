"""What a model holds in memory, in types shared by engine, runner and admin; and glibc's allocator settings."""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Final

from msgspec import Struct


class Part(Enum):
    """Parts of memory that sleep releases and wake restores. The values are the admin API's `tags`."""

    WEIGHTS = "weights"
    CACHE = "kv_cache"


class Held(Enum):
    """Whether a part is in memory.

    LOADED    usable by steps
    RELEASED  returned to the system; wake reads it from disk
    PARKED    returned by the device, copied to host memory until wake
    INVALID   in memory, but a load failed midway
    """

    LOADED = "loaded"
    RELEASED = "released"
    PARKED = "parked"
    INVALID = "invalid"


ALL: Final = frozenset(Part)
M_ARENA_MAX: Final = -8  # glibc malloc.h


class Memory(Struct, frozen=True, kw_only=True):
    """Where weights and cache are now."""

    weights: Held = Held.LOADED
    cache: Held = Held.LOADED

    @property
    def released(self) -> frozenset[Part]:
        held = {Part.WEIGHTS: self.weights, Part.CACHE: self.cache}
        return frozenset(part for part, how in held.items() if how in (Held.RELEASED, Held.PARKED))

    @property
    def whole(self) -> bool:
        return self.weights is self.cache is Held.LOADED


def share_heap() -> None:
    """Make all threads allocate from glibc's main heap. Call before the first thread starts.

    glibc otherwise creates an arena for each thread and never trims it: up to 30 MiB stayed resident after start.
    Under the interpreter lock threads seldom contend for the one heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # absent from other C libraries
        mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """Return freed heap memory to the system, where the C library can (glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
