"""Which parts of a model are in memory: the words that engine, runner and operators share."""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Final

from msgspec import Struct


class Part(Enum):
    """What memory is taken for, by the names that operators use."""

    WEIGHTS = "weights"
    CACHE = "kv_cache"


class Held(Enum):
    """LOADED: can be computed with. RELEASED: given back. INVALID: there, and half of it is something else.

    PARKED: given back by the device, and kept in the host's memory until it wakes.
    """

    LOADED = "loaded"
    RELEASED = "released"
    PARKED = "parked"
    INVALID = "invalid"


ALL: Final = frozenset(Part)
M_ARENA_MAX: Final = -8  # of malloc.h


class Memory(Struct, frozen=True, kw_only=True):
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
    """Make all threads take memory from one heap. Must be called before there are any.

    glibc gives each thread its own, and never gives back what is free at the end of one: up to 30 MiB of what a start
    leaves behind. Two threads seldom want memory at once here, and the interpreter lets only one of them go on.
    """
    settle = getattr(ctypes.CDLL(None), "mallopt", None)
    if settle is not None:  # glibc's own
        settle(M_ARENA_MAX, 1)


def trim() -> None:
    """Make the C library give back to the system what was freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's own
        trim(0)
