"""Hold weights and cache in memory of infd's own, so that it can be given back and used again in place.

An arena is one range of addresses, carved from the front into tensors. Nothing
is touched before it is used: what a server never needs, it never occupies.
"""

from __future__ import annotations

import ctypes
import mmap
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infd.errors import OutOfMemory
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from torch import Tensor

LARGE_PAGE = 2**21  # bytes
MADV_COLLAPSE = 25  # since Linux 6.1; the mmap module has no name for it
CGROUPS = Path("/sys/fs/cgroup")


class Arena:
    """Memory of one purpose on one device: an anonymous mapping on a CPU, one allocation elsewhere."""

    def __init__(self, size: int, device: torch.device, purpose: str) -> None:
        self.size = size
        self._settled = 0
        self.used = 0
        self.purpose = purpose
        self._map: mmap.mmap | None = None
        try:
            if device.type == "cpu":
                self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
            else:
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        except (OSError, OverflowError, MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"no memory for {purpose}: {size / 2**20:,.0f} MiB on {device} ({error})") from error

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next `shape` elements, aligned to 64 bytes. Raises OutOfMemory when the arena is full."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        end = start + prod(shape) * dtype.itemsize
        if end > self.size:
            raise OutOfMemory(f"the arena for {self.purpose} holds {self.size:,} bytes; {end:,} are needed")
        self.used = end
        return self._memory[start:end].view(dtype).view(shape)

    def settle(self) -> bool:
        """Move the next of what was taken into a large page; return whether more may follow.

        A CPU reads weights half as fast again from large pages. But to have them from the first touch on delays the
        start by seconds where the system must make them first, so it is done later, and piece by piece.
        """
        if self._map is None:
            return False
        address = self._memory.data_ptr()
        first = -(-(address + self._settled) // LARGE_PAGE) * LARGE_PAGE
        if first + LARGE_PAGE > address + self.used:
            return False
        self._settled = first + LARGE_PAGE - address
        # The mmap module's own madvise would keep the interpreter to itself meanwhile.
        return not ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(LARGE_PAGE), MADV_COLLAPSE)

    @property
    def releasable(self) -> bool:
        return self._map is not None

    def release(self) -> None:
        """Give the memory back to the system; every tensor stays where it is and reads as zeros until it is rewritten.

        Only a CPU can do this in place; elsewhere the memory goes with the arena.
        """
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._settled = 0


def available_bytes(device: torch.device) -> int:
    """Return how much memory could be taken now, on a CPU within the limits of this process's control groups."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
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
