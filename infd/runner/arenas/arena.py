"""Hold weights and cache in memory of infd's own, so that it can be given back and used again in place.

An arena is one range of addresses, carved from the front into tensors. A bank is a device's memory: it says how much
is free, and makes arenas. This one is a CPU's, where nothing is touched before it is used: what a server never needs,
it never occupies. A GPU's is in `vram.py`.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch

from infd.errors import OutOfMemory
from infd.memory import trim
from infd.rounding import round_up
from infd.runner.arenas.host import LARGE_PAGE, MADV_COLLAPSE, Mapping, available_bytes
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# What is moved into large pages at once: some 60 ms of work, in which nobody waits for the interpreter's lock.
PIECE: Final = 8 * LARGE_PAGE
MOST_FAILURES: Final = 4  # pieces in turn for which the system has no large pages
STATM = Path("/proc/self/statm")
CPU: Final = torch.device("cpu")


class Extent(Protocol):
    """A range of addresses, and the memory behind it.

    content  all of it, as bytes; it stays where it is while the memory is given back, and must not be read then
    large    bytes that `settle` is known to have made faster to read
    """

    content: Tensor
    large: int

    def release(self) -> None:
        """Give the memory back; the addresses are kept."""

    def restore(self) -> None:
        """Have memory behind all addresses again; it reads as zeros. Raises OutOfMemory, and then holds none."""

    def settle(self, used: int) -> bool:
        """Do a little that makes the first `used` bytes faster to read; return whether there is more to do."""


class Arena:
    """Memory of one purpose on one device."""

    def __init__(
        self, size: int, device: torch.device, purpose: str, extent: Callable[[int, torch.device], Extent] | None = None
    ) -> None:
        """extent: where it lies; else in an anonymous mapping on a CPU, in one allocation of torch's elsewhere."""
        self.size = size
        self.used = 0
        self.purpose = purpose
        self._device = device
        make = extent or (Anonymous if device.type == "cpu" else Allocated)
        try:
            self._extent = make(size, device)
        except (OSError, OverflowError, MemoryError, OutOfMemory, torch.OutOfMemoryError) as error:
            raise self._missing(error) from error

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next `shape` elements, aligned to 64 bytes. Raises OutOfMemory when the arena is full."""
        start = round_up(self.used, ALIGNMENT)
        end = start + prod(shape) * dtype.itemsize
        if end > self.size:
            raise OutOfMemory(f"the arena for {self.purpose} holds {self.size:,} bytes; {end:,} are needed")
        self.used = end
        return self._extent.content[start:end].view(dtype).view(shape)

    @property
    def content(self) -> Tensor:
        """Return what was taken, as bytes."""
        return self._extent.content[: self.used]

    @property
    def large(self) -> int:
        """Return how many bytes of what was taken are known to lie in large pages."""
        return self._extent.large

    def settle(self) -> bool:
        """Make a little of what was taken faster to read; return whether there is more to do."""
        return self._extent.settle(self.used)

    def release(self) -> None:
        """Give the memory back to the system; every tensor stays where it is, and may be used after `restore`."""
        self._extent.release()

    def restore(self) -> None:
        """Have memory again in the same place; it reads as zeros. Raises OutOfMemory, and then holds none."""
        try:
            self._extent.restore()
        except OutOfMemory as error:
            raise self._missing(error) from error

    def _missing(self, error: BaseException) -> OutOfMemory:
        return OutOfMemory(f"no memory for {self.purpose}: {self.size / 2**20:,.0f} MiB on {self._device} ({error})")


class Anonymous:
    """An anonymous mapping of this process."""

    def __init__(self, size: int, device: torch.device = CPU, mapping: Mapping | None = None) -> None:
        """mapping: of at least `size` bytes, else one of its own. Raises OSError, OverflowError."""
        self._mapping = mapping or Mapping(size)
        self.content = torch.frombuffer(self._mapping.map, dtype=torch.uint8)
        self.large = 0
        self._looked = self._failed = 0  # places of large pages; pieces in turn

    def release(self) -> None:
        self._mapping.release()
        self.large = self._looked = self._failed = 0

    def restore(self) -> None:
        """The system gives a page when it is touched."""

    def settle(self, used: int) -> bool:
        """Move the next of it into large pages.

        A CPU reads weights half as fast again from large pages. But to have them from the first touch on delays the
        start by seconds where the system must make them first, so it is done later, and piece by piece.
        """
        start = self._mapping.piece(self._looked)
        size = 0 if start is None else min(PIECE, (used - start) // LARGE_PAGE * LARGE_PAGE)
        if start is None or size <= 0 or self._failed == MOST_FAILURES:
            return False
        self._looked += size // LARGE_PAGE
        if self._mapping.advise(start, MADV_COLLAPSE, size):
            self.large, self._failed = self.large + size, 0
        else:
            self._failed += 1
        return True


class Allocated:
    """One allocation of torch's, whose memory goes only when its address does, with the last tensor in it."""

    large = 0

    def __init__(self, size: int, device: torch.device) -> None:
        self.content = torch.zeros(size, dtype=torch.uint8, device=device)
        self._released = False

    def release(self) -> None:
        self._released = True

    def restore(self) -> None:
        if self._released:
            self.content.zero_()
        self._released = False

    def settle(self, used: int) -> bool:
        return False


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, of which on a CPU only those take memory that are touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return Arena(prod(shape) * dtype.itemsize, device, "zeros").take(shape, dtype)


class Parked(Protocol):
    """A place elsewhere for what an arena holds."""

    def fetch(self) -> None:
        """Copy what the arena holds. Raises OutOfMemory, DeviceLost; what there is then must still be dropped."""

    def put_back(self) -> None:
        """Copy it to where it was, once there is memory again. Raises DeviceLost."""

    def drop(self) -> None:
        """Let go of the copy, whole or not. Raises DeviceLost; then it may be tried again."""


class Arenas(Protocol):
    """Where arenas are made."""

    def arena(self, size: int, purpose: str) -> Arena:
        """Raises OutOfMemory."""


class Bank(Arenas, Protocol):
    """A device's memory.

    sleepless  why an arena's memory cannot be given back while its addresses stay; empty where it can
    apart      whether the device has memory of its own, from which what must not be lost can be moved to the host
    others     bytes that were held when infd came to it; 0 where it is not apart
    """

    sleepless: str
    apart: bool
    others: int

    def free(self) -> int:
        """Return how many bytes could be taken now."""

    def held(self) -> int:
        """Return what the device, on a CPU this process, holds in bytes."""

    def trim(self) -> None:
        """Give back what earlier steps have left behind for later ones."""

    def peak(self, work: Callable[[], object]) -> int:
        """Do it, and return the bytes that it took at most beside what was held before; 0 where it is not apart."""

    def kept(self, work: Callable[[], object]) -> int:
        """Do it, and return the bytes held since then that tensors have no part in; 0 where it is not apart."""

    def park(self, arena: Arena, beat: Callable[[], None]) -> Parked:
        """Return a place in the host's memory for what an arena holds. Raises OutOfMemory where that has no room."""

    def resident(self) -> dict[str, int]:
        """Return what stays when arenas are released, in bytes by what it is."""


class HostBank:
    """A CPU's memory, which is the system's."""

    sleepless = ""
    apart = False
    others = 0

    def arena(self, size: int, purpose: str) -> Arena:
        return Arena(size, CPU, purpose)

    def free(self) -> int:
        return available_bytes()

    def held(self) -> int:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def trim(self) -> None:
        trim()

    def peak(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def kept(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def park(self, arena: Arena, beat: Callable[[], None]) -> Parked:
        raise OutOfMemory("there is no other memory than the host's")

    def resident(self) -> dict[str, int]:
        return {}
