"""Release a GPU's memory while its addresses stay reserved, so that captured graphs stay valid.

Addresses are reserved once. Memory is created in pieces and mapped to these addresses, unmapped on release, and created
and mapped again on restore. A piece's handle is released as soon as the piece is mapped. From then on only the mapping
keeps the memory allocated, so unmapping frees the memory.

If a driver call fails, the pieces that are still mapped stay recorded; the next restore uses them, or the next release
unmaps them.

A range of addresses is freed with its last tensor. If this happens on a thread that must not synchronize with the
device, because the thread has no CUDA context or captures a graph, the bank's next call frees the range.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from infd.errors import InfdError, OutOfMemory
from infd.rounding import round_up
from infd.runner.arenas.arena import Anonymous, Arena, HostBank
from infd.runner.arenas.dlpack import tensor_at
from infd.runner.arenas.driver import Refused, find
from infd.runner.arenas.host import Mapping, Populating, available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from infd.runner.arenas.arena import Bank, Parked
    from infd.runner.arenas.driver import Driver

log = logging.getLogger("infd.runner")

PIECE: Final = 2**26  # bytes created or copied per driver call; a beat follows each copy
HOST_SHARE: Final = 0.8  # largest share of free host memory for parked weights: pinned memory cannot be swapped


def bank_of(device: torch.device) -> Bank:
    """Return a device's bank: a HostBank for a CPU, a GpuBank for a GPU, a TorchBank if GpuBank is unusable."""
    if device.type == "cpu":
        return HostBank()
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    driver = find(device)
    if isinstance(driver, str):
        return TorchBank(device, driver)
    bank = GpuBank(device, driver)
    reason = _unusable(bank)
    return bank if reason is None else TorchBank(device, reason)


def _unusable(bank: GpuBank) -> str | None:
    """Return why torch cannot compute with the bank's mapped memory; None if it can."""
    try:
        tensor = bank.arena(1, "a trial").take((1,), torch.uint8)
        if tensor.item() != 0 or tensor.fill_(7).item() != 7:
            return "mapped memory does not return the bytes written to it"
    except OutOfMemory:
        return None  # not a defect of mapped memory: the weights' arena will raise OutOfMemory again
    except Exception as error:  # any error of torch or the driver: TorchBank is used instead
        return f"torch rejects mapped memory ({error})"
    return None


class Addresses:
    """A range of a GPU's addresses, and the memory mapped there."""

    def __init__(self, size: int, driver: Driver, unfreed: deque[Callable[[], None]]) -> None:
        """Reserve at least `size` bytes. Raises OutOfMemory, DeviceLost.

        unfreed  queue of functions that free ranges, for ranges whose last tensor was freed on a thread that must not
                 synchronize with the device
        """
        names = driver.names
        self._driver = driver
        self._kind = names.CUmemAllocationProp()
        self._kind.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = driver.ordinal
        self._access = names.CUmemAccessDesc()
        self._access.location.type = names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = driver.ordinal
        self._access.flags = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = names.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._grain = int(driver("cuMemGetAllocationGranularity", self._kind, least))
        self.size = round_up(max(1, size), self._grain)
        self.first = int(driver("cuMemAddressReserve", self.size, 0, 0, 0))
        self._whole = False
        self._memory = _Backing(driver, self.first)
        weakref.finalize(self, _free_or_defer, driver, self.first, self.size, self._memory, unfreed).atexit = False

    def restore(self) -> None:
        """Map zeroed memory to the whole range. If OutOfMemory or DeviceLost is raised, all memory is unmapped."""
        driver, memory = self._driver, self._memory
        if self._whole:
            return
        try:
            for offset, length in self._pieces():
                if offset not in memory.mapped:
                    memory.map(offset, length, self._kind)
            driver("cuMemSetAccess", self.first, self.size, [self._access], 1)
            # Uncleared memory may contain NaN, and 0 * NaN is not 0.
            driver("cuMemsetD8", self.first, 0, self.size)
            driver("cuCtxSynchronize")
        except BaseException:
            memory.clear()
            raise
        self._whole = True

    def clear(self) -> None:
        """Release all memory. If a piece cannot be unmapped, raises DeviceLost; the next call tries again."""
        self._whole = False
        self._memory.clear()

    def _pieces(self) -> Iterator[tuple[int, int]]:
        piece = max(PIECE // self._grain, 1) * self._grain
        for offset in range(0, self.size, piece):
            yield offset, min(piece, self.size - offset)


class _Backing:
    """The memory mapped to a range of addresses. Exists until the range is freed, possibly longer than its Addresses.

    mapped  bytes of each piece, by offset
    """

    def __init__(self, driver: Driver, first: int) -> None:
        self.mapped: dict[int, int] = {}
        self._driver = driver
        self._first = first
        self._handles: list[Any] = []  # handles not yet released

    def map(self, offset: int, length: int, kind: Any) -> None:
        self._handles.append(self._driver("cuMemCreate", length, kind, 0))
        self._driver("cuMemMap", self._first + offset, length, 0, self._handles[-1], 0)
        self.mapped[offset] = length
        self._release()

    def clear(self) -> None:
        if self.mapped:
            self._driver("cuCtxSynchronize")  # a running kernel that reads unmapped memory would fault
        for offset, length in sorted(self.mapped.items(), reverse=True):
            self._driver("cuMemUnmap", self._first + offset, length)
            del self.mapped[offset]
        self._release()

    def _release(self) -> None:
        while self._handles:
            self._driver("cuMemRelease", self._handles[-1])
            self._handles.pop()


def _free_or_defer(driver: Driver, first: int, size: int, memory: _Backing, unfreed: deque[Callable[[], None]]) -> None:
    """Free a range whose tensors are all freed: now if this thread may synchronize, else in the bank's next call."""
    free = partial(_free, driver, first, size, memory)
    try:
        now = driver.may_wait()
    except InfdError:
        now = False
    if now:
        free()
    else:
        unfreed.append(free)


def _free(driver: Driver, first: int, size: int, memory: _Backing) -> None:
    """Free a range of addresses and its memory. A failure is logged."""
    try:
        memory.clear()
        driver("cuMemAddressFree", first, size)
    except InfdError as error:  # a finalizer has no caller to raise to; the process's end frees the range
        log.warning("a range of the GPU's addresses could not be freed: %s", error)


class Reserved:
    """Implements Extent with a GPU's memory, mapped to reserved addresses."""

    large = 0

    def __init__(self, size: int, device: torch.device, driver: Driver, unfreed: deque[Callable[[], None]]) -> None:
        self._addresses = addresses = Addresses(size, driver, unfreed)
        addresses.restore()
        self.content = tensor_at(addresses.first, addresses.size, device, addresses)

    def release(self) -> None:
        self._addresses.clear()

    def restore(self) -> None:
        self._addresses.restore()

    def collapse(self, used: int) -> bool:
        return False


class PinnedCopy:
    """Implements Parked in host memory, pinned if the host permits, because a GPU copies pinned memory faster."""

    def __init__(self, content: Tensor, driver: Driver, beat: Callable[[], None]) -> None:
        self._driver = driver
        self._beat = beat
        self._on_device, self._size = content.data_ptr(), content.nbytes
        mapping = Mapping(self._size)
        self._host = Anonymous(self._size, mapping=mapping)
        self._populating = Populating(mapping, self._size)
        self._on_host = self._host.content.data_ptr()
        self._registered: list[int] = []
        self._refused = False

    def fetch(self) -> None:
        self._driver("cuCtxSynchronize")
        for offset, length in self._pieces():
            self._populating.reach(offset + length)  # pinning would commit unpopulated memory page by page
            self._register(offset, length)
            self._driver("cuMemcpyDtoH", self._on_host + offset, self._on_device + offset, length)
            self._beat()

    def _register(self, offset: int, length: int) -> None:
        """Pin a piece if the host permits. Without pinning, as under a limit on locked memory, copies are slower."""
        if self._refused:
            return
        try:
            self._driver("cuMemHostRegister", self._on_host + offset, length, 0)
        except Refused as error:
            self._refused = True
            log.warning("host memory for parked weights cannot be pinned, so copies are slower: %s", error)
        else:
            self._registered.append(offset)

    def put_back(self) -> None:
        for offset, length in self._pieces():
            self._driver("cuMemcpyHtoD", self._on_device + offset, self._on_host + offset, length)
            self._beat()

    def drop(self) -> None:
        self._populating.stop()
        while self._registered:
            self._driver("cuMemHostUnregister", self._on_host + self._registered[-1])
            self._registered.pop()
        self._host.release()

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for offset in range(0, self._size, PIECE):
            yield offset, min(PIECE, self._size - offset)


class GpuBank:
    """A GPU's memory, through its driver."""

    sleep_refusal = ""
    dedicated = True

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device = device
        self._driver = driver
        self._unfreed: deque[Callable[[], None]] = deque()
        self.others = self.held()

    def arena(self, size: int, purpose: str) -> Arena:
        self._sweep()
        return Arena(size, self._device, purpose, partial(Reserved, driver=self._driver, unfreed=self._unfreed))

    def free(self) -> int:
        self._sweep()
        return int(self._driver("cuMemGetInfo")[0])

    def held(self) -> int:
        self._sweep()
        free, total = self._driver("cuMemGetInfo")
        return int(total) - int(free)

    def trim(self) -> None:
        self._sweep()
        torch.cuda.empty_cache()

    def _sweep(self) -> None:
        """Free the ranges that could not be freed together with their last tensor."""
        while self._unfreed:
            self._unfreed.popleft()()

    def peak(self, work: Callable[[], object]) -> int:
        return _peak(self._device, work)

    def retained(self, work: Callable[[], object]) -> int:
        return _retained(self, self._device, work)

    def park(self, arena: Arena, beat: Callable[[], None]) -> Parked:
        needed, room = arena.used, int(HOST_SHARE * available_bytes())
        if needed > room:
            raise OutOfMemory(
                f"{arena.purpose} need {needed / 2**20:,.0f} MiB of host memory; {room / 2**20:,.0f} MiB may be used"
            )
        return PinnedCopy(arena.content, self._driver, beat)

    def resident(self) -> dict[str, int]:
        return _resident(self._device, self.held())


class TorchBank:
    """A GPU's memory, through torch's allocator. The memory of an arena cannot be released while its tensors exist."""

    dedicated = True

    def __init__(self, device: torch.device, reason: str) -> None:
        self.sleep_refusal = f"memory of {device} cannot be released: {reason}"
        self._device = device
        self.others = self.held()

    def arena(self, size: int, purpose: str) -> Arena:
        return Arena(size, self._device, purpose)

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def peak(self, work: Callable[[], object]) -> int:
        return _peak(self._device, work)

    def retained(self, work: Callable[[], object]) -> int:
        return _retained(self, self._device, work)

    def park(self, arena: Arena, beat: Callable[[], None]) -> Parked:
        raise OutOfMemory(self.sleep_refusal)

    def resident(self) -> dict[str, int]:
        return {}


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Return the most bytes that torch reserved for `work`; other allocators cannot use reserved memory."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _retained(bank: Bank, device: torch.device, work: Callable[[], object]) -> int:
    def outside_torch() -> int:
        torch.cuda.synchronize(device)
        return bank.held() - torch.cuda.memory_reserved(device)

    before = outside_torch()
    work()
    return max(0, outside_torch() - before)


def _resident(device: torch.device, held: int) -> dict[str, int]:
    """Return the bytes allocated on a device while arenas are released, by use.

    held  bytes that all processes have allocated on the device
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"context_and_others": held}
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    segments = [each for each in snapshot if each["device"] == device.index]
    graphs = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0))
    reserved = sum(each["total_size"] for each in segments)
    return {"graphs": graphs, "rows_and_workspaces": reserved - graphs, "context_and_others": held - reserved}
