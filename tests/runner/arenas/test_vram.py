"""GPU memory released and restored: the real code over a fake driver."""

from __future__ import annotations

import ctypes
import gc
import inspect
import mmap
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infd.errors import DeviceLost, OutOfMemory
from infd.runner.arenas import vram
from infd.runner.arenas.dlpack import tensor_at
from infd.runner.arenas.driver import REFUSALS, Driver
from infd.runner.arenas.host import LARGE_PAGE
from infd.runner.arenas.vram import TorchBank, bank_of
from tests.runner.cuda_driver import GRAIN, NAMES, Bank, BooksError, FakeDriver

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(vram, "PIECE", 4 * GRAIN)


def no_beat() -> None:
    pass


class Failing:
    """Fails the n-th call from now on, and with `lasting` all later ones."""

    def __init__(self, number: int, error: str = "CUDA_ERROR_UNKNOWN", *, lasting: bool = False) -> None:
        self.left = number
        self.error = error
        self.lasting = lasting
        self.failed = ""

    def __call__(self, call: str) -> str | None:
        self.left -= 1
        if self.left == 0 or (self.lasting and self.left < 0):
            self.failed = self.failed or call
            return self.error
        return None


def test_an_arena_is_few_mappings_of_one_range_and_holds_zeros():
    driver = FakeDriver()
    arena = Bank(driver).arena(11 * GRAIN - 5, "weights")
    assert [held.size for held in driver.ranges.values()] == [11 * GRAIN]
    assert sorted(driver.mapped.values()) == [3 * GRAIN, 4 * GRAIN, 4 * GRAIN]
    driver.audit()
    tensor = arena.take((100,), torch.float32)
    assert not tensor.any()
    assert tensor.data_ptr() in driver.ranges


def test_memory_is_given_back_and_comes_back_zeroed_in_the_same_place():
    driver = FakeDriver()
    arena = Bank(driver).arena(9 * GRAIN, "cache")
    tensor = arena.take((9 * GRAIN // 4,), torch.float32)
    tensor.fill_(1.0)
    address = tensor.data_ptr()
    arena.release()
    arena.release()
    assert driver.used == 0
    assert len(driver.ranges) == 1
    arena.restore()
    arena.restore()
    driver.audit()
    assert driver.used == 9 * GRAIN
    assert tensor.data_ptr() == address
    assert not tensor.any()


def test_restoring_mapped_memory_keeps_its_content():
    arena = Bank(FakeDriver()).arena(GRAIN, "cache")
    tensor = arena.take((3,), torch.float32).fill_(2.0)
    arena.restore()
    assert tensor.tolist() == [2.0] * 3


def test_a_range_is_freed_with_the_last_tensor_in_it():
    driver = FakeDriver()
    arena = Bank(driver).arena(GRAIN, "weights")
    tensor = arena.take((4,), torch.float32)
    del arena
    gc.collect()
    assert len(driver.ranges) == 1
    assert tensor.tolist() == [0.0] * 4
    del tensor
    gc.collect()
    assert not driver.ranges
    assert driver.used == 0


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("ask", [Bank.free, Bank.held, Bank.trim, lambda bank: bank.arena(GRAIN, "cache")])
def test_where_the_device_cannot_be_waited_for_the_banks_next_call_frees_the_range(ask, capturing, monkeypatch):
    driver = FakeDriver()
    bank = Bank(driver)
    tensors = [bank.arena(GRAIN, "cache").take((4,), torch.float32)]
    if capturing:
        with monkeypatch.context() as capture:
            capture.setattr(torch.cuda, "is_initialized", lambda: True)
            capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            tensors.clear()
    else:
        elsewhere = Thread(target=tensors.clear)
        elsewhere.start()
        elsewhere.join()
    assert driver.used == GRAIN
    kept = ask(bank)
    assert driver.calls["cuMemAddressFree"] == 1, kept


def test_an_arena_that_does_not_fit_names_its_purpose_and_the_call_and_holds_nothing():
    driver = FakeDriver(capacity=8 * GRAIN)
    bank = Bank(driver)
    with pytest.raises(OutOfMemory, match=r"no memory for weights: 0 MiB on cpu \(cuMemCreate: CUDA_ERROR_OUT_OF_M"):
        bank.arena(9 * GRAIN, "weights")
    gc.collect()
    bank.trim()
    assert (driver.used, driver.ranges) == (0, {})


def test_an_error_of_the_driver_names_the_call():
    driver = FakeDriver()
    arena = Bank(driver).arena(GRAIN, "weights")
    arena.release()
    driver.fails = lambda call: "CUDA_ERROR_INVALID_VALUE" if call == "cuMemMap" else None
    with pytest.raises(DeviceLost, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        arena.restore()
    assert driver.used == 0


def test_whichever_call_fails_a_restore_holds_nothing_and_can_be_tried_again():
    driver = FakeDriver()
    arena = Bank(driver).arena(9 * GRAIN, "cache")
    number, failed = 0, set()
    while True:
        number += 1
        arena.release()
        driver.fails = Failing(number)
        try:
            arena.restore()
        except DeviceLost as error:
            failed.add(str(error).partition(":")[0])
            assert driver.used == 0
            driver.fails = lambda call: None
            arena.restore()
        else:
            break
        driver.audit()
        assert driver.used == 9 * GRAIN
    assert failed == {"cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize"}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_memory_that_could_not_be_unmapped_is_unmapped_or_reused_later(number):
    driver = FakeDriver()
    arena = Bank(driver).arena(9 * GRAIN, "cache")
    tensor = arena.take((9 * GRAIN,), torch.uint8)
    for attempt in (arena.release, arena.restore):
        driver.fails = Failing(number)
        with pytest.raises(DeviceLost):
            arena.release()
        driver.fails = lambda call: None
        attempt()
        assert driver.used == (0 if attempt == arena.release else 9 * GRAIN)
        driver.audit()
        arena.restore()
        assert not tensor.any()


def test_nothing_is_unmapped_while_work_is_running():
    driver = FakeDriver()
    arena = Bank(driver).arena(GRAIN, "cache")
    driver.running = True
    arena.release()
    assert driver.used == 0


def test_parked_memory_returns_unchanged(monkeypatch):
    driver = FakeDriver()
    room = Bank(driver)
    arena = room.arena(10 * GRAIN, "weights")
    tensor = arena.take((5 * GRAIN,), torch.uint8)
    tensor.copy_(torch.arange(5 * GRAIN) % 251)
    expected, beats = tensor.clone(), []
    parked = room.park(arena, lambda: beats.append(1))
    parked.fetch()
    assert sum(driver.registered.values()) == 5 * GRAIN
    arena.release()
    for _ in range(2):
        arena.restore()
        parked.put_back()
        assert tensor.equal(expected)
    parked.drop()
    parked.drop()
    assert not driver.registered
    assert len(beats) == 6


def test_the_hosts_memory_is_there_before_it_is_pinned(monkeypatch):
    monkeypatch.setattr(vram, "PIECE", LARGE_PAGE)
    driver = FakeDriver()
    bank = Bank(driver)
    arena = bank.arena(8 * LARGE_PAGE, "weights")
    arena.take((8 * LARGE_PAGE,), torch.uint8)
    missing = []

    def pin(address: int, size: int, flags: int) -> None:
        pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
        missing.append(sum(1 - (page & 1) for page in pages))
        driver.registered[address] = size

    monkeypatch.setitem(driver._calls, "cuMemHostRegister", pin)
    parked = bank.park(arena, no_beat)
    parked.fetch()
    parked.drop()
    ends = LARGE_PAGE // mmap.PAGESIZE  # bytes outside of whole huge pages become resident when touched
    assert len(missing) == 8
    assert missing[1:-1] == [0] * 6
    assert sum(missing) <= ends


def test_whichever_call_fails_parking_changes_nothing():
    driver = FakeDriver()
    room = Bank(driver)
    arena = room.arena(10 * GRAIN, "weights")
    tensor = arena.take((10 * GRAIN,), torch.uint8).fill_(7)
    for number in range(1, 8):
        driver.fails = Failing(number)
        parked = room.park(arena, no_beat)
        with pytest.raises(DeviceLost, match="cu"):
            parked.fetch()
        parked.drop()
        assert not driver.registered
        assert bool((tensor == 7).all())


def test_weights_are_parked_without_pinned_memory_too(caplog):
    driver = FakeDriver()
    arena = Bank(driver).arena(10 * GRAIN, "weights")
    tensor = arena.take((10 * GRAIN,), torch.uint8)
    tensor.copy_(torch.arange(10 * GRAIN) % 251)
    expected = tensor.clone()
    driver.pageable = True
    driver.fails = lambda call: "CUDA_ERROR_NOT_SUPPORTED" if call == "cuMemHostRegister" else None
    parked = Bank(driver).park(arena, no_beat)
    parked.fetch()
    arena.release()
    arena.restore()
    parked.put_back()
    assert tensor.equal(expected)
    parked.drop()
    assert (driver.calls["cuMemHostRegister"], driver.calls["cuMemHostUnregister"]) == (1, 0)
    assert caplog.text.count("cannot be pinned") == 1


def test_memory_that_could_not_be_unpinned_is_unpinned_later():
    driver = FakeDriver()
    room = Bank(driver)
    arena = room.arena(10 * GRAIN, "weights")
    arena.take((10 * GRAIN,), torch.uint8)
    for number in (1, 2, 3):
        parked = room.park(arena, no_beat)
        parked.fetch()
        driver.fails = Failing(number)
        with pytest.raises(DeviceLost, match="cuMemHostUnregister"):
            parked.drop()
        assert len(driver.registered) == 4 - number
        parked.drop()
        assert not driver.registered


def test_the_host_parks_weights_that_fit_its_memory(monkeypatch):
    room = Bank(FakeDriver())
    arena = room.arena(10 * GRAIN, "weights")
    arena.take((10 * GRAIN,), torch.uint8)
    monkeypatch.setattr(vram, "available_bytes", lambda: 12 * GRAIN)
    with pytest.raises(OutOfMemory, match=r"weights need .* MiB of host memory; 0 MiB may be used"):
        room.park(arena, no_beat)
    monkeypatch.setattr(vram, "available_bytes", lambda: 13 * GRAIN)
    room.park(arena, no_beat).drop()


def test_a_bank_counts_its_allocated_memory():
    driver = FakeDriver(capacity=100 * GRAIN)
    room = Bank(driver)
    arena = room.arena(10 * GRAIN, "weights")
    assert (room.free(), room.held()) == (90 * GRAIN, 10 * GRAIN)
    arena.release()
    assert (room.free(), room.held()) == (100 * GRAIN, 0)
    assert room.resident() == {"context_and_others": 0}
    room.trim()


def test_without_the_drivers_package_memory_stays_mapped_and_the_reason_is_reported(monkeypatch):
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr("infd.runner.arenas.driver._bindings", absent)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    found = bank_of(torch.device("cuda", 0))
    assert isinstance(found, TorchBank)
    assert found.sleep_refusal.startswith("memory of cuda:0 cannot be released: cuda-bindings cannot be imported (No")


def test_a_driver_that_cannot_map_is_left_alone(monkeypatch):
    attributes = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    old = SimpleNamespace(
        CUresult=NAMES.CUresult,
        CUdevice_attribute=attributes,
        cuDeviceGet=lambda ordinal: (0, 10 + ordinal),
        cuDeviceGetAttribute=lambda attribute, device: (0, (attribute, device) != (102, 11)),
    )
    monkeypatch.setattr("infd.runner.arenas.driver._bindings", lambda: old)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    assert bank_of(torch.device("cuda", 1)).sleep_refusal.endswith("cannot map memory to reserved addresses")


@pytest.fixture
def found(monkeypatch) -> FakeDriver:
    """A driver that bank_of finds, of a GPU that torch can be asked about."""
    fake = FakeDriver()
    monkeypatch.setattr(vram, "find", lambda device: Driver(fake, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    return fake


def _refuses(*_: Any) -> None:
    raise RuntimeError("pointer resides on host memory")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (_refuses, "torch rejects mapped memory (pointer resides on host memory)"),
        (lambda *_: torch.ones(GRAIN, dtype=torch.uint8), "mapped memory does not return the bytes written to it"),
    ],
)
def test_where_torch_cannot_use_mapped_memory_it_allocates_and_the_reason_is_reported(
    found, monkeypatch, tensor, reason
):
    monkeypatch.setattr(vram, "tensor_at", tensor)
    bank = bank_of(torch.device("cuda", 0))
    assert isinstance(bank, TorchBank)
    assert bank.sleep_refusal == f"memory of cuda:0 cannot be released: {reason}"


def test_where_torch_can_use_mapped_memory_arenas_are_made_of_it(found, monkeypatch):
    monkeypatch.setattr(vram, "tensor_at", lambda address, size, device, owner: tensor_at(address, size, CPU, owner))
    bank = bank_of(torch.device("cuda", 0))
    assert isinstance(bank, vram.GpuBank)
    assert bank.held() == 0, "what was tried first is gone"


def test_the_fake_driver_detects_misuse():
    driver = FakeDriver()
    call = Driver(driver, 0)
    first = call("cuMemAddressReserve", GRAIN, 0, 0, 0)
    prop = NAMES.CUmemAllocationProp()
    handle = call("cuMemCreate", GRAIN, prop, 0)
    call("cuMemMap", first, GRAIN, 0, handle, 0)
    for wrong in (
        ("cuMemAddressFree", first, GRAIN),
        ("cuMemUnmap", first, GRAIN // 2),
        ("cuMemsetD8", first, 0, GRAIN),
        ("cuMemMap", first, GRAIN, 0, call("cuMemCreate", GRAIN, prop, 0), 0),
    ):
        with pytest.raises(BooksError):
            call(*wrong)


class Bound:
    """The fake driver behind the real package's signatures, structures and constants."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.fake = FakeDriver(names=real)
        self.bound: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.real, name)
        if not name.startswith("cu") or not callable(attribute):
            return attribute

        def call(*args: Any) -> Any:
            inspect.signature(attribute).bind(*args)
            if not torch.cuda.is_available():  # then the package converts the arguments, and finds no driver to call
                with pytest.raises(RuntimeError, match="driver library"):
                    attribute(*args)
            self.bound.add(name)
            return getattr(self.fake, name)(*args)

        return call


def test_the_calls_are_those_of_the_real_package():
    real = pytest.importorskip("cuda.bindings.driver")
    bound = Bound(real)
    room = Bank(bound)  # type: ignore[arg-type]
    arena = room.arena(9 * GRAIN, "weights")
    tensor = arena.take((9 * GRAIN,), torch.uint8).fill_(5)
    parked = room.park(arena, no_beat)
    parked.fetch()
    arena.release()
    arena.restore()
    parked.put_back()
    parked.drop()
    assert bool((tensor == 5).all())
    assert room.free() == 2**30 - 9 * GRAIN
    del arena, tensor
    gc.collect()
    room.trim()
    assert not bound.fake.ranges
    assert bound.bound == {
        "cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease",
        "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize", "cuCtxGetCurrent",
        "cuMemHostRegister", "cuMemHostUnregister", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemGetInfo",
    }  # fmt: skip
    wanted = real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    inspect.signature(real.cuDeviceGetAttribute).bind(wanted, 0)
    inspect.signature(real.cuDeviceGet).bind(0)
    assert all(name in real.CUresult.__members__ for name in REFUSALS)
