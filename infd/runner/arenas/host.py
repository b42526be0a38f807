"""The host's memory: how much of it is free, and ranges of addresses that it is behind.

Importing this does not import torch: while that is imported, memory for the weights can be had already.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Condition, Event, Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from infd.rounding import round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import Config

LARGE_PAGE: Final = 2**21  # bytes
MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; the mmap module has no name for it
MADV_COLLAPSE: Final = 25  # since Linux 6.1; nor for this
# Of which one exists where a GPU may be used.
GPUS: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
SHARES: Final = MappingProxyType({"none": 1.0, "int8": 0.5, "int4": 0.3})  # that is kept of weights stored in 16 bits
WORTHWHILE: Final = 2**26  # bytes; fewer come in no time
CGROUPS = Path("/sys/fs/cgroup")

SLOW_S: Final = 0.002  # what a large page that is there takes ten times over; one that must be made first takes longer
PATIENCE: Final = 4  # large pages that may take so long

LAST: Final = 19  # of priorities, as nice(2) counts them
PACE_S: Final = 0.25


class Mapping:
    """Anonymous memory of this process, which the system gives page by page: when it is touched, or asked to."""

    def __init__(self, size: int) -> None:
        """Raises OSError, OverflowError."""
        self.map = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = len(self.map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.first = -self._address % LARGE_PAGE  # where the first large page begins that lies in here whole

    def release(self, start: int = 0) -> None:
        """Give back what is behind the addresses from the page on that begins at or behind `start`."""
        first = round_up(start, mmap.PAGESIZE)
        if first < self.size:
            self.map.madvise(mmap.MADV_DONTNEED, first)

    def piece(self, number: int) -> int | None:
        """Return where the place for a large page begins, counted from the first that lies in here whole, or None."""
        start = self.first + number * LARGE_PAGE
        return start if start + LARGE_PAGE <= self.size else None

    def advise(self, start: int, advice: int, size: int = LARGE_PAGE) -> bool:
        """Tell the system something about the places of large pages; return whether it does as it is told."""
        # The mmap module's own madvise would keep the interpreter to itself meanwhile.
        madvise = ctypes.CDLL(None).madvise
        return not madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(size), advice)


class Populating:
    """Has the system give memory for the front of a mapping, from a thread of its own.

    In large pages, which a CPU reads half as fast again and a driver pins faster, as long as the system has them at
    hand: to make some it first moves others about, for seconds.
    """

    def __init__(self, mapping: Mapping, size: int) -> None:
        """Begin to have `size` bytes, rounded up to large pages that lie in the mapping whole."""
        self.held = 0  # bytes by now
        self._mapping = mapping
        self._size = size
        self._stopped = Event()
        self._more = Condition()
        self._ended = False
        self._thread = Thread(target=self._run, name="infd-memory", daemon=True)
        self._thread.start()

    def reach(self, end: int) -> None:
        """Wait until the bytes before `end` are there, or no more will be."""
        with self._more:
            self._more.wait_for(lambda: self._ended or self._mapping.first + self.held >= end)

    def wait(self) -> None:
        """Wait until as much is there as was asked for, or as the system has."""
        self._thread.join()

    def stop(self) -> None:
        """Have no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        mapping, number, slow = self._mapping, 0, 0
        while not self._stopped.is_set() and self.held < self._size and (start := mapping.piece(number)) is not None:
            began = time.monotonic()
            if slow < PATIENCE:
                mapping.advise(start, mmap.MADV_HUGEPAGE)
            if not mapping.advise(start, MADV_POPULATE_WRITE):
                break  # the system cannot, or has no memory left
            slow += time.monotonic() - began > SLOW_S
            number += 1
            with self._more:
                self.held += LARGE_PAGE
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()


class Settling:
    """Makes memory faster to read, piece by piece, from a thread of its own that everything else goes before.

    It works while nothing is computed, and on a piece every PACE_S where something always is.
    """

    def __init__(self, settle: Callable[[], bool], quiet: Event) -> None:
        """Begin.

        settle  does a piece; returns whether there may be more
        quiet   set while nothing is computed
        """
        self.ended = False  # by itself
        self._settle = settle
        self._quiet = quiet
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="infd-settling", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Do no more. Returns when no piece is under way. Called where something is computed, which is not quiet."""
        self._stopped.set()
        self._quiet.set()
        self._thread.join()
        self._quiet.clear()

    def _run(self) -> None:
        with suppress(OSError):  # whatever filters system calls may not know this one
            os.setpriority(os.PRIO_PROCESS, 0, LAST)  # on Linux that is this thread, not the process
        while True:
            self._quiet.wait(PACE_S)
            if self._stopped.is_set():
                return
            if not self._settle():
                self.ended = True
                return


class Headstart:
    """Memory that is had ahead until somebody claims it."""

    def __init__(self, expected: int) -> None:
        """Begin to have that many bytes; a quarter more can be claimed. Raises OSError, OverflowError."""
        self._mapping = Mapping(expected + expected // 4)
        self._populating = Populating(self._mapping, expected)
        self._kept = sys.maxsize

    @property
    def held(self) -> int:
        """Return how many bytes are there by now."""
        return min(self._populating.held, self._kept)

    def wait(self) -> None:
        """Wait until as much is there as was expected, or as the system has."""
        self._populating.wait()

    def claim(self, size: int) -> Mapping | None:
        """Return memory of at least `size` bytes, of which some is there; None if there are not as many addresses.

        Whatever is there beyond that is given back. It can be claimed once.
        """
        self._populating.stop()
        fits = size <= self._mapping.size
        self._kept = size if fits else 0
        self._mapping.release(self._kept)
        return self._mapping if fits else None


def kind(config: Config) -> str | None:
    """Return the kind of device that computes, as torch calls it; None where only torch can tell."""
    if config.device.kind == "auto":
        return None if any(map(Path.exists, GPUS)) else "cpu"
    return config.device.kind.partition(":")[0]


def headstart(config: Config) -> Headstart | None:
    """Begin to have memory for the weights, if they are large, and the host has plenty and will keep them."""
    if kind(config) != "cpu":
        return None
    try:
        stored = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
        expected = int(stored * SHARES[config.model.quantization])
        return Headstart(expected) if WORTHWHILE <= expected <= available_bytes() // 2 else None
    except OSError:  # of a file: loading will say so; of memory: nothing is lost but time
        return None


def available_bytes() -> int:
    """Return how much of the host's memory could be taken now within the limits of this process's control groups."""
    free = _numbers(Path("/proc/meminfo").read_text())["MemAvailable:"] * 1024
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    group = CGROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    limits = [_headroom(each) for each in (group, *group.parents) if each.is_relative_to(CGROUPS)]
    return int(max(0, min(free, *limits)))


def _headroom(group: Path) -> float:
    """Return how far a control group is from its limit. Files that it caches count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return float("inf")
        used = int((group / "memory.current").read_text())
        held = _numbers((group / "memory.stat").read_text())
    except FileNotFoundError:
        return float("inf")  # the root, or another version of control groups
    return int(limit) - used + held["inactive_file"] + held["active_file"]


def _numbers(table: str) -> dict[str, int]:
    """Read lines of `name number`."""
    return {words[0]: int(words[1]) for words in map(str.split, table.splitlines())}
