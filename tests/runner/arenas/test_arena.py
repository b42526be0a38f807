import ctypes
import mmap
import os
import threading
import time
from array import array
from functools import partial
from pathlib import Path

import pytest
import torch

from infd.errors import OutOfMemory
from infd.models.base import PageTensor
from infd.runner.arenas import host
from infd.runner.arenas.arena import MOST_FAILURES, PIECE, Allocated, Anonymous, Arena, zeros
from infd.runner.arenas.cache import CacheSpec
from infd.runner.arenas.host import LARGE_PAGE, Collapsing, Headstart, Mapping, Populating, available_bytes
from infd.runner.start.cache_size import Room, size_cache
from infd.scheduler.layout import CacheLayout, PageGroup

CPU = torch.device("cpu")
FULL = CacheLayout((PageGroup(layers=(0, 1), page_tokens=4),))
TENSORS = [PageTensor("k", (2, 4, 8), torch.float32), PageTensor("v", (2, 4, 8), torch.float32)]
PAGE = 2 * 2 * (2 * 4 * 8) * 4  # two slots, k and v


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def resident_in(mapping: Mapping) -> int:
    """Return the resident bytes of a mapping: those of the process also change with the threads of other tests."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping.map))
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(address // mmap.PAGESIZE * 8)
        flags = array("Q", entries.read(mapping.size // mmap.PAGESIZE * 8))
    return sum(flag >> 63 for flag in flags) * mmap.PAGESIZE


def sized(wanted=None, room=2**30, rows=4, max_model_len=64, layout=FULL):
    return size_cache(
        CacheSpec(layout, TENSORS),
        configured=wanted,
        room=Room(room, "all there is"),
        rows=rows,
        max_model_len=max_model_len,
        step_tokens=16,
    )


def test_tensors_of_an_arena_are_aligned_and_do_not_overlap():
    arena = Arena(1024, CPU, "test")
    odd = arena.take((3,), torch.uint8)
    wide = arena.take((4, 5), torch.float32)
    odd.fill_(255)
    wide.fill_(1.0)

    assert odd.data_ptr() % 64 == wide.data_ptr() % 64 == 0
    assert odd.tolist() == [255] * 3
    assert wide.shape == (4, 5)


def test_an_arena_holds_exactly_its_size():
    arena = Arena(128, CPU, "test")
    arena.take((65,), torch.uint8)
    with pytest.raises(OutOfMemory, match="test"):
        arena.take((1,), torch.uint8)


def test_an_arena_of_no_bytes_holds_empty_tensors():
    assert Arena(0, CPU, "nothing").take((0, 3), torch.float32).numel() == 0


def test_memory_that_cannot_exist_is_refused():
    with pytest.raises(OutOfMemory, match="weights"):
        Arena(2**62, CPU, "weights")


def test_settled_memory_is_in_huge_pages_with_unchanged_content():
    arena = Arena(5 * LARGE_PAGE, CPU, "test")
    held = arena.take((4 * LARGE_PAGE // 8,), torch.int64).copy_(torch.arange(4 * LARGE_PAGE // 8))
    before = _large_bytes()
    _settle(arena)
    if not arena.large:
        pytest.skip("the system makes no large pages")
    assert arena.large in {3 * LARGE_PAGE, 4 * LARGE_PAGE}  # the mapping need not begin with one
    assert _large_bytes() - before == arena.large
    assert held.equal(torch.arange(4 * LARGE_PAGE // 8))
    arena.release()
    assert (_large_bytes(), arena.large) == (before, 0)
    held.fill_(7)
    _settle(arena)
    assert arena.large
    assert (held == 7).all()


def _settle(arena):
    while arena.collapse():
        pass


def test_a_system_that_makes_no_large_pages_is_not_asked_again_and_again(monkeypatch):
    asked = []
    monkeypatch.setattr(Mapping, "advise", lambda mapping, start, advice, size: asked.append(start))
    arena = Arena(2 * MOST_FAILURES * PIECE, CPU, "test")
    arena.take((arena.size,), torch.uint8)
    _settle(arena)
    assert (len(asked), arena.large) == (MOST_FAILURES, 0)


class Pieces:
    """Simulates memory collapsed in a number of pieces; records the priority of the collapsing thread."""

    def __init__(self, count):
        self.left = count
        self.begun, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.priorities = set()

    def __call__(self):
        self.priorities.add(os.getpriority(os.PRIO_PROCESS, 0))
        self.begun.release()
        self.gate.acquire()
        self.left -= 1
        return self.left > 0


def test_collapsing_runs_at_the_lowest_priority_and_ends():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    quiet, pieces = threading.Event(), Pieces(2)
    quiet.set()
    collapsing = Collapsing(pieces, quiet)
    pieces.begun.acquire()
    assert not collapsing.ended
    pieces.gate.release(2)
    collapsing._thread.join()
    assert (collapsing.ended, pieces.priorities) == (True, {host.LAST})
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "other threads keep their priority"


def test_collapsing_waits_for_computation_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(host, "PACE_S", 600)
    pieces = Pieces(2)
    collapsing = Collapsing(pieces, threading.Event())
    collapsing.stop()
    assert (collapsing.ended, pieces.left) == (False, 2)
    monkeypatch.setattr(host, "PACE_S", 0)
    collapsing = Collapsing(pieces, threading.Event())
    pieces.gate.release(2)
    collapsing._thread.join()
    assert collapsing.ended


def test_nothing_is_settled_once_it_was_stopped():
    quiet, pieces = threading.Event(), Pieces(10**9)
    quiet.set()
    collapsing = Collapsing(pieces, quiet)
    pieces.begun.acquire()
    pieces.gate.release()
    collapsing.stop()
    left = pieces.left
    assert not collapsing._thread.is_alive()
    assert (pieces.left, quiet.is_set()) == (left, False)


def _large_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("AnonHugePages:")[2].split()[0]) * 1024


def test_an_arena_occupies_nothing_until_it_is_written_and_nothing_after_release():
    size = 2**26
    before = resident()
    arena = Arena(size, CPU, "test")
    tensor = arena.take((size // 4,), torch.float32)
    assert resident() - before < size / 8

    tensor.fill_(1.0)
    address = tensor.data_ptr()
    assert resident() - before > size * 7 / 8

    arena.release()
    assert resident() - before < size / 8
    assert tensor.data_ptr() == address
    assert not tensor[:: 2**16].any()

    tensor[-1] = 7.0  # and it can be used again, in place
    assert tensor[-1] == 7.0


def test_preallocated_memory_is_claimed_with_its_known_content_and_the_rest_released():
    size = 16 * LARGE_PAGE
    ahead = Headstart(2 * size)
    ahead.wait()
    mapping = ahead.claim(size)
    assert ahead.populated == size  # released memory counts as free
    assert size - LARGE_PAGE <= resident_in(mapping) <= size

    arena = Arena(size, CPU, "test", partial(Anonymous, mapping=mapping))
    tensor = arena.take((size // 8,), torch.int64)
    assert not tensor.any()
    tensor.copy_(torch.arange(size // 8))
    assert resident_in(mapping) < size + 2 * LARGE_PAGE
    arena.release()
    assert resident_in(mapping) < size / 8


def test_as_much_memory_is_there_as_was_waited_for():
    mapping = Mapping(16 * LARGE_PAGE)
    before = resident()
    populating = Populating(mapping, 8 * LARGE_PAGE)
    populating.reach(4 * LARGE_PAGE)
    assert resident() - before > 3 * LARGE_PAGE
    populating.reach(16 * LARGE_PAGE)  # there will be no more than were asked for
    assert populating.populated == 8 * LARGE_PAGE
    populating.stop()


def test_a_wait_for_memory_ends_when_populating_is_stopped(monkeypatch):
    monkeypatch.setattr(Mapping, "touch", lambda *_: time.sleep(0.05))
    populating = Populating(Mapping(2**30), 2**30)
    populating.stop()
    populating.reach(2**30)
    assert populating.populated < 2**30


def test_populating_goes_on_with_small_pages_where_large_pages_take_long(monkeypatch):
    advised: list[int] = []
    monkeypatch.setattr(Mapping, "advise", lambda mapping, start, advice, size: advised.append(advice))
    monkeypatch.setattr(host, "STRETCH", LARGE_PAGE)
    monkeypatch.setattr(host, "SLOW_S", 0.0)
    populating = Populating(Mapping(8 * LARGE_PAGE), 6 * LARGE_PAGE)
    populating.wait()
    assert populating.populated == 6 * LARGE_PAGE
    assert advised == [mmap.MADV_HUGEPAGE] * host.PATIENCE


def test_an_allocation_of_torchs_holds_zeros_when_it_is_new_and_when_it_was_given_back():
    arena = Arena(100, CPU, "cache", Allocated)
    tensor = arena.take((25,), torch.float32)
    assert not tensor.any()
    tensor.fill_(torch.nan)
    arena.restore()
    assert bool(tensor.isnan().all())
    arena.release()
    arena.restore()
    assert not tensor.any()


def test_preallocated_memory_is_released_if_the_address_space_is_too_small():
    before = resident()
    ahead = Headstart(8 * LARGE_PAGE)
    assert ahead.claim(16 * LARGE_PAGE) is None
    assert not ahead.populated
    assert resident() - before < LARGE_PAGE


def test_zeros_take_no_memory_until_they_are_touched():
    before = resident()
    tensor = zeros((2**10, 2**14), torch.int32, CPU)
    assert resident() - before < 2**20
    assert tensor.shape == (2**10, 2**14)
    assert not tensor[7].any()


def test_available_memory_is_within_the_machine():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_bytes() <= total


def test_available_memory_is_within_every_control_group_and_cached_files_count_as_free(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    assert available_bytes() > 900  # no limits anywhere

    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 200\ninactive_file 300\n")
    assert available_bytes() == 1000 - 700 + 500

    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 900


def test_a_page_has_as_many_slots_as_the_largest_group_has_layers():
    layout = CacheLayout(
        (PageGroup(layers=(1, 3, 5), page_tokens=4), PageGroup(layers=(0, 2), page_tokens=4, window=8))
    )
    assert CacheSpec(layout, TENSORS).page_bytes == 3 * PAGE // 2

    cache = CacheSpec(layout, TENSORS).allocate(5, Arena(2**20, CPU, "cache"))
    assert len(cache) == 5  # layers 0, 1, 2, 3 and 5
    assert cache[0].k.shape == (6, 2, 4, 8)
    assert cache[0].k.data_ptr() == cache[1].k.data_ptr()  # the first layer of either group: slot 0
    assert cache[2].v.data_ptr() == cache[3].v.data_ptr()  # the second: slot 1
    assert len({pages.k.data_ptr() for pages in cache}) == 3


def test_the_cache_is_as_large_as_asked_for_and_fits_its_arena():
    size = sized(wanted=10 * PAGE)
    assert size.pages == 8  # one is scratch, and alignment takes its share
    assert size.bytes <= 10 * PAGE
    CacheSpec(FULL, TENSORS).allocate(size.pages, Arena(size.bytes, CPU, "cache"))


def test_the_cache_is_never_larger_than_all_rows_could_use():
    assert sized().pages == 4 * 64 // 4


def test_the_cache_takes_all_free_memory():
    size = sized(room=100 * PAGE, rows=1000)
    assert 95 <= size.pages < 100
    assert size.reason == "all there is"


def test_max_model_len_is_lowered_until_one_sequence_fits():
    size = sized(wanted=10 * PAGE)
    assert size.max_model_len == size.pages * 4


def test_a_window_group_needs_pages_for_its_window_only():
    window = CacheLayout((PageGroup(layers=(0, 1), page_tokens=4, window=8),))
    assert sized(wanted=10 * PAGE, layout=window).max_model_len == 64


def test_a_cache_without_room_for_a_page_is_refused():
    with pytest.raises(OutOfMemory, match=r"cache\.bytes"):
        sized(wanted=PAGE)


def test_a_cache_for_one_token_is_refused_because_an_answer_takes_another():
    single = CacheLayout((PageGroup(layers=(0, 1), page_tokens=1),))
    assert sized(wanted=4 * PAGE, layout=single).max_model_len == 2
    with pytest.raises(OutOfMemory, match=r"room for 1 pages .*cache\.bytes"):
        sized(wanted=3 * PAGE, layout=single)


def test_no_groups_need_no_cache():
    size = sized(layout=CacheLayout(()))
    assert (size.pages, size.bytes, size.max_model_len) == (0, 0, 64)
