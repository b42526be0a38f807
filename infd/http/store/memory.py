"""A store in this process's memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import LiveConfig
    from infd.http.store.entry import Entry


class Holding(Struct, eq=False):
    """What a tenant has stored: bytes, and the ids of entries, the least recently changed first."""

    bytes: int = 0
    ids: dict[str, None] = field(default_factory=dict)


class MemoryStore:
    """A `Store` whose entries are lost when the process ends."""

    def __init__(self, live: LiveConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, Entry]] = OrderedDict()  # with the time of the last change
        self._tenants: dict[str, Holding] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def open(self) -> None:
        pass

    async def add(self, entry: Entry) -> None:
        if entry.bytes <= self._live.now.store.bytes:
            self._put(entry)
            self._trim()

    async def get(self, id: str, tenant: str) -> Entry | None:
        return self._find(id, tenant)

    async def change(self, id: str, tenant: str, change: Callable[[Entry], Entry]) -> Entry | None:
        if (entry := self._find(id, tenant)) is None:
            return None
        changed = change(entry)
        self._drop(id)
        await self.add(changed)
        return changed

    async def delete(self, id: str, tenant: str) -> bool:
        if self._find(id, tenant) is None:
            return False
        self._drop(id)
        return True

    async def close(self) -> None:
        pass

    def _find(self, id: str, tenant: str) -> Entry | None:
        self._trim()
        _, entry = self._entries.get(id, (0.0, None))
        return entry if entry is not None and entry.tenant == tenant else None

    def _put(self, entry: Entry) -> None:
        self._entries[entry.id] = self._clock(), entry
        self.bytes += entry.bytes
        held = self._tenants.setdefault(entry.tenant, Holding())
        held.bytes += entry.bytes
        held.ids[entry.id] = None

    def _trim(self) -> None:
        while self._entries:
            oldest, (changed, _) = next(iter(self._entries.items()))
            if self._clock() - changed <= self._live.now.store.age_s:
                break
            self._drop(oldest)
        while len(self._entries) > self._live.now.store.entries:
            self._drop_of(max(self._tenants.values(), key=lambda held: len(held.ids)))
        while self.bytes > self._live.now.store.bytes:
            self._drop_of(max(self._tenants.values(), key=lambda held: held.bytes))

    def _drop_of(self, held: Holding) -> None:
        self._drop(next(iter(held.ids)))

    def _drop(self, id: str) -> None:
        _, entry = self._entries.pop(id)
        self.bytes -= entry.bytes
        held = self._tenants[entry.tenant]
        held.bytes -= entry.bytes
        del held.ids[id]
        if not held.ids:
            del self._tenants[entry.tenant]
