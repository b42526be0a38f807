"""A store in a SQLite file.

One thread uses the file; each call is a transaction. A transaction is written, at least to the kernel's page cache,
before the call returns. So a crash of the process loses no completed call and leaves no partial change. A power failure
may lose the last transactions, but does not damage the file. The process locks the file while it runs.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import msgspec

from infd.errors import ConfigError, NotStored
from infd.http.store.entry import Entry, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.config import LiveConfig
    from infd.offload import Offload

P = ParamSpec("P")
R = TypeVar("R")

APPLICATION_ID: Final = 0x1F2D5702  # identifies infd's files
VERSION: Final = 1
_LOG = logging.getLogger("infd.http")
_PARTS: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])
# `changed` numbers the changes, so that the order of entries does not depend on the clock.
_TABLE: Final = """
CREATE TABLE entries (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, changed INTEGER NOT NULL, time REAL NOT NULL, bytes INTEGER NOT NULL,
    unfinished INTEGER NOT NULL, head BLOB NOT NULL, items BLOB NOT NULL, events BLOB NOT NULL
) STRICT
"""
# The id of the least recently changed entry of the tenant that holds most.
_OLDEST_OF_MOST_ENTRIES: Final = """
SELECT id FROM entries WHERE tenant = (SELECT tenant FROM entries GROUP BY tenant ORDER BY count(*) DESC LIMIT 1)
ORDER BY changed LIMIT 1
"""
_OLDEST_OF_MOST_BYTES: Final = """
SELECT id FROM entries WHERE tenant = (SELECT tenant FROM entries GROUP BY tenant ORDER BY sum(bytes) DESC LIMIT 1)
ORDER BY changed LIMIT 1
"""
_SELECT: Final = "SELECT id, tenant, head, items, events, unfinished FROM entries "


class SqliteStore:
    """A `Store` whose entries survive the process.

    clock  seconds since the epoch, because ages are compared across restarts
    """

    def __init__(self, live: LiveConfig, offload: Offload, clock: Callable[[], float] = time.time) -> None:
        self._live = live
        self._path = Path(live.now.store.path)
        self._offload = offload
        self._clock = clock
        self._db: sqlite3.Connection | None = None
        self._entries = self._bytes = self._changes = 0

    async def open(self) -> None:
        await self._offload.storage(self._open)

    async def add(self, entry: Entry) -> None:
        if entry.bytes <= self._live.now.store.bytes:
            await self._do(self._put, entry)

    async def get(self, id: str, tenant: str) -> Entry | None:
        return await self._do(self._find, id, tenant)

    async def change(self, id: str, tenant: str, change: Callable[[Entry], Entry]) -> Entry | None:
        return await self._do(self._change, id, tenant, change)

    async def delete(self, id: str, tenant: str) -> bool:
        return await self._do(self._delete, id, tenant)

    async def close(self) -> None:
        await self._offload.storage(self._close)

    async def _do(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._offload.storage(self._transact, partial(work, *args, **kwargs))

    # All further methods are called on the store's thread.

    def _open(self) -> None:
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"store.path: {self._path}: {error}") from None
        try:
            self._check(db)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            db.close()
            held = "another process uses it" if "locked" in str(error) else f"damaged, or not infd's: {error}"
            raise ConfigError(f"store.path: {self._path}: {held}") from None
        except ConfigError:
            db.close()
            raise

    def _check(self, db: sqlite3.Connection) -> None:
        """Lock and check the file, and store responses that a killed process left unfinished as failed."""
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        found, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        empty = not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if not (empty and not found) and (found, version) != (APPLICATION_ID, VERSION):
            raise ConfigError(f"store.path: {self._path}: a file of another program, or of another version of infd")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        with _transaction(db):
            if empty:
                db.execute(_TABLE)
                db.execute("CREATE INDEX entries_changed ON entries (changed)")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {VERSION}")
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            # Files of earlier versions lack this index, from which the tenants' shares are read.
            db.execute("CREATE INDEX IF NOT EXISTS entries_tenant ON entries (tenant, changed, bytes)")
            self._db = db
            self._count()
            for row in db.execute(_SELECT + "WHERE unfinished").fetchall():
                self._put(failed(_entry(row)))
            self._trim()

    def _count(self) -> None:
        counts = "SELECT count(*), coalesce(sum(bytes), 0), coalesce(max(changed), 0) FROM entries"
        self._entries, self._bytes, self._changes = self._run(counts).fetchone()

    def _transact(self, work: Callable[[], R]) -> R:
        assert self._db is not None
        before = self._entries, self._bytes
        try:
            with _transaction(self._db):
                return work()
        except (sqlite3.Error, OverflowError) as error:
            self._entries, self._bytes = before
            _LOG.error("the store failed", extra={"path": str(self._path), "error": str(error)})
            raise NotStored(str(error)) from None
        except BaseException:
            self._entries, self._bytes = before
            raise

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        assert self._db is not None
        return self._db.execute(statement, values)

    def _put(self, entry: Entry) -> None:
        self._drop(entry.id)
        self._changes += 1
        self._entries += 1
        self._bytes += entry.bytes
        items = msgspec.msgpack.encode(entry.items)
        row = self._changes, self._clock(), entry.bytes, entry.unfinished, entry.head, items, entry.events
        self._run("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", entry.id, entry.tenant, *row)
        self._trim()

    def _find(self, id: str, tenant: str) -> Entry | None:
        oldest = self._clock() - self._live.now.store.age_s
        row = self._run(_SELECT + "WHERE id = ? AND tenant = ? AND time >= ?", id, tenant, oldest).fetchone()
        return None if row is None else _entry(row)

    def _change(self, id: str, tenant: str, change: Callable[[Entry], Entry]) -> Entry | None:
        if (entry := self._find(id, tenant)) is None:
            return None
        changed = change(entry)
        if changed.bytes <= self._live.now.store.bytes:
            self._put(changed)
        else:
            self._drop(id)
        return changed

    def _delete(self, id: str, tenant: str) -> bool:
        if self._find(id, tenant) is None:
            return False
        self._drop(id)
        return True

    def _drop(self, id: str) -> None:
        row = self._run("DELETE FROM entries WHERE id = ? RETURNING bytes", id).fetchone()
        if row is not None:
            self._entries -= 1
            self._bytes -= row[0]

    def _trim(self) -> None:
        """Drop expired entries; beyond a bound, the oldest entries of the tenant that holds most."""
        while (row := self._run("SELECT id, time FROM entries ORDER BY changed LIMIT 1").fetchone()) is not None:
            if self._clock() - row[1] <= self._live.now.store.age_s:
                break
            self._drop(row[0])
        while self._entries > self._live.now.store.entries:
            self._drop(self._first(_OLDEST_OF_MOST_ENTRIES))
        while self._bytes > self._live.now.store.bytes:
            self._drop(self._first(_OLDEST_OF_MOST_BYTES))

    def _first(self, statement: str) -> str:
        id: str = self._run(statement).fetchone()[0]
        return id

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite itself rolls back after some errors, such as a full disk
            db.execute("ROLLBACK")
        raise


def _entry(row: tuple[Any, ...]) -> Entry:
    id, tenant, head, items, events, unfinished = row
    parts = _PARTS.decode(items)
    return Entry(id=id, tenant=tenant, head=head, items=parts, events=events, unfinished=bool(unfinished))
