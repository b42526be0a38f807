"""A fake of `cuda.bindings.driver` over host memory that checks every call.

Misuse that gives undefined behaviour or a late error on a GPU fails at once: a range mapped twice, unmapped in part or
read while unmapped, a handle released twice. Newly mapped memory contains garbage. Any call can be made to fail before
it has any effect.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from infd.runner.arenas.driver import Driver
from infd.runner.arenas.vram import GpuBank

if TYPE_CHECKING:
    from collections.abc import Callable

GRAIN = 4096
GARBAGE = 0xFF  # makes every float not a number


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


NAMES = SimpleNamespace(
    CUresult=Result,
    CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1),
    CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
    CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
    CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
    CUmemAllocationProp=lambda: SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1)),
    CUmemAccessDesc=lambda: SimpleNamespace(flags=0, location=SimpleNamespace(type=0, id=-1)),
)


class BooksError(Exception):
    """The driver was used as it must not be."""


@dataclass
class Range:
    size: int
    store: mmap.mmap


@dataclass
class Piece:
    """Memory that was made: it lives while its handle or its mapping does."""

    size: int
    handle: bool = True
    mapped_at: int | None = None
    accessible: bool = False


class FakeDriver:
    """The state of one device.

    fails     called before every call with its name; a result other than None is the call's error
    calls     number of calls by name
    running   whether the device may still be computing
    pageable  whether slow copies from and to host memory that is not pinned are permitted
    """

    def __init__(self, *, capacity: int = 2**30, names: Any = NAMES) -> None:
        """capacity: bytes that the device has; names: constants and structures, as of cuda.bindings.driver"""
        self.capacity = capacity
        self.names = names
        self.fails: Callable[[str], str | None] = lambda call: None
        self.ranges: dict[int, Range] = {}
        self.pieces: dict[int, Piece] = {}  # by handle
        self.registered: dict[int, int] = {}
        self._thread = get_ident()
        self.calls: Counter[str] = Counter()
        self.running = False
        self.pageable = False
        self._handles = 0
        self._calls: dict[str, Callable[..., Any]] = {
            "cuMemGetAllocationGranularity": self._granularity,
            "cuMemAddressReserve": self._reserve,
            "cuMemAddressFree": self._free,
            "cuMemCreate": self._create,
            "cuMemRelease": self._release,
            "cuMemMap": self._map,
            "cuMemSetAccess": self._allow,
            "cuMemUnmap": self._unmap,
            "cuMemsetD8": self._memsetd8,
            "cuMemcpyDtoH": self._memcpydtoh,
            "cuMemcpyHtoD": self._memcpyhtod,
            "cuMemHostRegister": self._pin,
            "cuMemHostUnregister": self._unpin,
            "cuCtxSynchronize": self._synchronize,
            "cuCtxGetCurrent": self._context,
            "cuMemGetInfo": self._info,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self._calls:
            return getattr(self.names, name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            status = self.names.CUresult
            if (error := self.fails(name)) is not None:
                return (status[error],)
            given = self._calls[name](*args)
            if isinstance(given, str):
                return (status[given],)
            return (status.CUDA_SUCCESS, *(given or ()))

        return call

    # Books

    @property
    def used(self) -> int:
        return sum(piece.size for piece in self.pieces.values())

    @property
    def mapped(self) -> dict[int, int]:
        return {piece.mapped_at: piece.size for piece in self.pieces.values() if piece.mapped_at is not None}

    def require(self, truth: bool, why: str) -> None:
        if not truth:
            raise BooksError(why)

    def audit(self) -> None:
        """Assert that all memory is mapped, within ranges, and usable."""
        for piece in self.pieces.values():
            assert not piece.handle, "a handle is kept"
            assert piece.mapped_at is not None, "memory that nobody can reach"
            assert piece.accessible, "memory is mapped that must not be touched"
            self._within(piece.mapped_at, piece.size)
        spans = sorted(self.mapped.items())
        for (first, size), (second, _) in pairwise(spans):
            assert first + size <= second

    # Calls

    def _granularity(self, prop: Any, option: Any) -> tuple[int]:
        self.require(int(prop.location.id) == 0, "another device")
        return (GRAIN,)

    def _reserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[int]:
        self.require(size > 0 and size % GRAIN == 0, "a range in parts of a grain")
        store = mmap.mmap(-1, size)
        first = _address(store)
        self.ranges[first] = Range(size, store)
        return (first,)

    def _free(self, ptr: int, size: int) -> None:
        self.require(ptr in self.ranges and self.ranges[ptr].size == size, "a range that was not reserved so")
        self.require(not any(ptr <= at < ptr + size for at in self.mapped), "a range is freed with memory in it")
        del self.ranges[ptr]

    def _create(self, size: int, prop: Any, flags: int) -> tuple[int] | str:
        self.require(size > 0 and size % GRAIN == 0, "memory in parts of a grain")
        if self.used + size > self.capacity:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self._handles += 1
        self.pieces[self._handles] = Piece(size)
        return (self._handles,)

    def _release(self, handle: int) -> None:
        self.require(handle in self.pieces and self.pieces[handle].handle, "a handle is released twice")
        self.pieces[handle].handle = False
        self._forget(handle)

    def _map(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> None:
        piece = self.pieces[handle]
        self.require(piece.handle and piece.size == size and offset == 0, "memory is mapped that is not there")
        self.require(piece.mapped_at is None, "memory is mapped twice")
        self._within(ptr, size)
        for at, length in self.mapped.items():
            self.require(ptr + size <= at or at + length <= ptr, "memory is mapped over other memory")
        piece.mapped_at = ptr
        ctypes.memset(ptr, GARBAGE, size)

    def _allow(self, ptr: int, size: int, desc: list[Any], count: int) -> None:
        self.require(len(desc) == count == 1 and int(desc[0].location.id) == 0, "access for another device")
        self.require(int(desc[0].flags) == 3, "access that does not let a kernel write")
        inside = [piece for piece in self.pieces.values() if piece.mapped_at in range(ptr, ptr + size)]
        self.require(sum(piece.size for piece in inside) == size, "access to a range that has holes")
        for piece in inside:
            piece.accessible = True

    def _unmap(self, ptr: int, size: int) -> None:
        self.require(not self.running, "memory is unmapped while a kernel may read it")
        handle = next((each for each, piece in self.pieces.items() if piece.mapped_at == ptr), None)
        self.require(handle is not None, "nothing is mapped there")
        assert handle is not None
        piece = self.pieces[handle]
        self.require(piece.size == size, "memory is unmapped by half")
        piece.mapped_at, piece.accessible = None, False
        ctypes.memset(ptr, GARBAGE, size)
        self._forget(handle)

    def _memsetd8(self, address: int, value: int, count: int) -> None:
        self._readable(address, count)
        ctypes.memset(address, value, count)

    def _memcpydtoh(self, host: int, device: int, count: int) -> None:
        self._readable(device, count)
        self._pinned(host, count)
        ctypes.memmove(host, device, count)

    def _memcpyhtod(self, device: int, host: int, count: int) -> None:
        self._readable(device, count)
        self._pinned(host, count)
        ctypes.memmove(device, host, count)

    def _pin(self, p: int, bytesize: int, Flags: int) -> None:
        for at, length in self.registered.items():
            self.require(p + bytesize <= at or at + length <= p, "host memory is pinned twice")
        self.registered[p] = bytesize

    def _unpin(self, p: int) -> None:
        self.require(p in self.registered, "host memory is unpinned that was not pinned")
        del self.registered[p]

    def _synchronize(self) -> None:
        self.require(self._context() != (0,), "a thread without a context waits for the device")
        self.running = False

    def _context(self) -> tuple[int]:
        return (int(get_ident() == self._thread),)

    def _info(self) -> tuple[int, int]:
        return self.capacity - self.used, self.capacity

    def _forget(self, handle: int) -> None:
        piece = self.pieces[handle]
        if not piece.handle and piece.mapped_at is None:
            del self.pieces[handle]

    def _within(self, ptr: int, size: int) -> None:
        inside = any(first <= ptr and ptr + size <= first + held.size for first, held in self.ranges.items())
        self.require(inside, "memory is mapped where nothing is reserved")

    def _readable(self, ptr: int, size: int) -> None:
        there = [piece for piece in self.pieces.values() if piece.mapped_at is not None and piece.accessible]
        end = ptr + size
        inside = sum(
            max(0, min(end, piece.mapped_at + piece.size) - max(ptr, piece.mapped_at))
            for piece in there
            if piece.mapped_at is not None
        )
        self.require(inside == size, "memory is used that is not there")

    def _pinned(self, ptr: int, size: int) -> None:
        ends = {at: at + length for at, length in self.registered.items()}
        pinned = any(at <= ptr and ptr + size <= end for at, end in ends.items())
        self.require(pinned != self.pageable, "host memory is not pinned, or need not be copied as slowly as this")


def _address(store: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(store))


class Bank(GpuBank):
    """A GPU's memory over FakeDriver, with tensors for the CPU. The memory used by steps is simulated.

    keeps  bytes that a captured step keeps
    """

    def __init__(self, driver: FakeDriver, grains: int = 0) -> None:
        """grains: that a step takes for each of its tokens"""
        super().__init__(torch.device("cpu"), Driver(driver, 0))
        self.tried: list[int] = []
        self.keeps = 0
        self._grains = grains

    def peak(self, work: Callable[[], object]) -> int:
        assert isinstance(work, partial)
        plan = work.args[1]
        work()
        self.tried.append(plan.tokens)
        return self._grains * GRAIN * plan.tokens

    def retained(self, work: Callable[[], object]) -> int:
        work()
        return self.keeps
