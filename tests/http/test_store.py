"""The stores of responses and conversations: in memory, and in a SQLite file."""

from __future__ import annotations

import json
import resource
import sqlite3
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.config import Config, LiveConfig, StoreConfig
from infd.errors import ConfigError, InvalidRequest, NotStored
from infd.http.store.entry import ENTRY_BYTES, Entry, is_id, new_id
from infd.http.store.memory import MemoryStore
from infd.http.store.sqlite import SqliteStore
from infd.offload import Offload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from infd.http.store.entry import Store


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(path: Path | None, clock: Clock | None = None, **bounds: Any) -> AsyncIterator[Store]:
    """Open a store: in the file, or with None in memory."""
    live, offload = LiveConfig(Config(store=StoreConfig(path=str(path or ""), **bounds))), Offload()
    clock = clock or Clock()
    store = MemoryStore(live, clock) if path is None else SqliteStore(live, offload, clock)
    try:
        await store.open()
        try:
            yield store
        finally:
            await store.close()
    finally:
        offload.close()


@pytest.fixture(params=["memory", "sqlite"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "store"


def entry(number: int = 0, size: int = 0, **fields: Any) -> Entry:
    return Entry(**{"id": f"resp_{number:048x}", "tenant": "ann", "head": b"x" * size, **fields})


async def kept(store: Store, count: int) -> list[int]:
    return [number for number in range(count) if await store.get(entry(number).id, "ann") is not None]


async def test_an_entry_is_read_as_it_was_stored(path: Path | None):
    whole = entry(items=(b"[1]", b"[2,3]"), events=b"event\n\n", unfinished=True, head=b'{"a":1}')
    async with opened(path) as store:
        await store.add(whole)

        assert await store.get(whole.id, "ann") == whole
        assert await store.get(whole.id, "bob") is None
        assert await store.get(entry(1).id, "ann") is None
        assert not await store.delete(whole.id, "bob")
        assert await store.delete(whole.id, "ann")
        assert not await store.delete(whole.id, "ann")
        assert await store.get(whole.id, "ann") is None


async def test_a_change_is_made_whole_or_not_at_all(path: Path | None):
    def refuse(entry: Entry) -> Entry:
        raise InvalidRequest("no")

    async with opened(path) as store:
        await store.add(entry())
        changed = await store.change(entry().id, "ann", lambda found: msgspec.structs.replace(found, head=b"new"))
        with pytest.raises(InvalidRequest):
            await store.change(entry().id, "ann", refuse)
        assert await store.change(entry().id, "bob", refuse) is None
        assert await store.get(entry().id, "ann") == changed == entry(head=b"new")


async def test_the_oldest_entries_are_dropped_beyond_a_number(path: Path | None):
    async with opened(path, entries=2) as store:
        for number in range(3):
            await store.add(entry(number))
        assert await kept(store, 3) == [1, 2]
        await store.change(entry(1).id, "ann", lambda found: found)
        await store.add(entry(3))
        assert await kept(store, 4) == [1, 3]


async def test_the_oldest_entries_are_dropped_beyond_a_size(path: Path | None):
    async with opened(path, bytes=3 * (ENTRY_BYTES + 1000)) as store:
        for number in range(4):
            await store.add(entry(number, 1000))
        assert await kept(store, 4) == [1, 2, 3]
        await store.add(entry(4, 10_000))
        assert await kept(store, 5) == [1, 2, 3]
        await store.change(entry(3).id, "ann", lambda found: msgspec.structs.replace(found, events=b"x" * 1500))
        assert await kept(store, 5) == [2, 3]
        await store.change(entry(3).id, "ann", lambda found: msgspec.structs.replace(found, events=b"x" * 10_000))
        assert await kept(store, 5) == [2]


@pytest.mark.parametrize("bounds", [{"entries": 6}, {"bytes": 6 * (ENTRY_BYTES + 1000)}])
async def test_a_tenant_evicts_its_own_entries_only(path: Path | None, bounds: dict[str, int]):
    async with opened(path, **bounds) as store:
        await store.add(entry(0, head=b"x" * 1000))
        await store.add(entry(1, head=b"x" * 1000))
        for number in range(2, 40):
            await store.add(entry(number, head=b"x" * 1000, tenant="bob"))
        assert await kept(store, 2) == [0, 1]
        bobs = [number for number in range(2, 40) if await store.get(entry(number).id, "bob") is not None]
        assert bobs == [36, 37, 38, 39]
        for number in range(40, 50):
            await store.add(entry(number, head=b"x" * 1000))
        assert len(await kept(store, 50)) == 3, "each has half"
        bobs = [number for number in range(2, 40) if await store.get(entry(number).id, "bob") is not None]
        assert bobs == [37, 38, 39]


async def test_entries_are_dropped_at_an_age(path: Path | None):
    clock = Clock()
    async with opened(path, clock, age_s=10.0) as store:
        await store.add(entry(0))
        await store.add(entry(1))
        clock.now += 6
        await store.change(entry(1).id, "ann", lambda found: found)
        clock.now += 6
        assert await kept(store, 2) == [1]
        clock.now += 6
        assert await kept(store, 2) == []


async def test_a_file_keeps_entries_and_their_order(tmp_path: Path):
    path = tmp_path / "store"
    async with opened(path) as store:
        for number in range(3):
            await store.add(entry(number, items=(b"[]",)))
        await store.change(entry(0).id, "ann", lambda found: found)
    async with opened(path) as store:
        assert await store.get(entry(1).id, "ann") == entry(1, items=(b"[]",))
    async with opened(path, entries=2) as store:
        assert await kept(store, 3) == [0, 2]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_an_unfinished_response_has_failed_at_the_next_start(tmp_path: Path):
    response = {"id": "x", "status": "queued", "error": None, "output": []}
    async with opened(tmp_path / "store") as store:
        await store.add(entry(head=json.dumps(response).encode(), items=(b"[]",), unfinished=True))
    async with opened(tmp_path / "store") as store:
        found = await store.get(entry().id, "ann")

    assert found is not None
    assert (found.unfinished, found.items) == (False, (b"[]",))
    ended = json.loads(found.head)
    assert (list(ended), ended["status"], ended["error"]["code"]) == (list(response), "failed", "server_error")


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (a)")
    other.close()


def later(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 2")
    other.close()


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("made", "spoil", "message"),
    [
        (False, lambda path: path.write_bytes(b"hello" * 1000), "damaged, or not infd's"),
        (False, foreign, "another program"),
        (True, later, "another version"),
        (True, damage, "damaged"),
        (True, lambda path: path.write_bytes(path.read_bytes()[:5000]), "damaged"),
        (False, lambda path: path.mkdir(), "Is a directory"),
    ],
    ids=["text", "another program's", "another version's", "damaged", "truncated", "directory"],
)
async def test_a_file_that_is_no_store_is_refused_unchanged(tmp_path: Path, made: bool, spoil: Any, message: str):
    path = tmp_path / "store"
    if made:
        async with opened(path) as store:
            for number in range(20):
                await store.add(entry(number, 2000))
    spoil(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ConfigError, match=message) as refused:
        async with opened(path):
            pass
    assert f"store.path: {path}" in str(refused.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


async def test_a_missing_directory_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"store\.path: .*No such file"):
        async with opened(tmp_path / "none" / "store"):
            pass


async def test_a_file_has_one_user(tmp_path: Path):
    async with opened(tmp_path / "store") as store:
        await store.add(entry())
        with pytest.raises(ConfigError, match="another process uses it"):
            async with opened(tmp_path / "store"):
                pass
        assert await kept(store, 1) == [0]


@contextmanager
def files_of_at_most(bytes: int) -> Iterator[None]:
    """Let writes beyond `bytes` of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_entries_that_do_not_fit_the_disk_are_refused_and_change_nothing(tmp_path: Path):
    async with opened(tmp_path / "store") as store:
        await store.add(entry(0, 1000))
        with files_of_at_most(2**17):
            for number in (1, 2):
                with pytest.raises(NotStored) as refused:
                    await store.add(entry(number, 2**20))
            with pytest.raises(NotStored):
                await store.change(
                    entry(0).id, "ann", lambda found: msgspec.structs.replace(found, events=b"x" * 2**20)
                )
            assert await store.get(entry(0).id, "ann") == entry(0, 1000)
        assert (refused.value.status, refused.value.code) == (507, "not_stored")
        await store.add(entry(3, 2**20))
        assert await kept(store, 4) == [0, 3]


async def test_the_file_grows_no_further_than_the_bound(tmp_path: Path):
    path = tmp_path / "store"
    async with opened(path, bytes=2**20) as store:
        for number in range(200):
            await store.add(entry(number, 2**16))
    assert path.stat().st_size < 2 * 2**20


def test_only_new_ids_are_ids():
    assert is_id(new_id("resp"), "resp")
    assert not is_id(new_id("conv"), "resp")
    for text in ("", "resp_", "resp_1", new_id("resp") + "\n", "resp_" + "é" * 48, "resp_" + "\ud800" * 48):
        assert not is_id(text, "resp")
