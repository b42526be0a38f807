"""Which adapters are served under which names, and how long each one's weights are kept.

A name stands for what was read when it was loaded; reading it again in place is
another generation, and requests keep the one they began with. Weights that
nobody uses may leave memory for others, and are read again when they are asked
for; if their files have changed by then, that is said rather than served. Who
asks for one that does not fit beside those in use waits until enough of them
are not, and is passed only so often by others who ask for those.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import AdapterExists, AdapterTooLarge, AdapterUnavailable, CheckpointError, ModelNotFound
from infd.request import Adapter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from infd.request import AdapterFacts
    from infd.telemetry.events import Events

    Read = Callable[[Adapter, str | None, int], Awaitable[AdapterFacts]]

LONGEST_NAME = 128
# Clients put a name into paths, where some resolve dots before they ask.
_NAME = re.compile(r"[A-Za-z0-9][\w.:-]*(/(?!\.\.?(/|\Z))[\w.:-]+)*", re.ASCII)


class AdapterRow(Struct, kw_only=True):
    """What operators see of an adapter. `state`: ready; stored, its weights not in memory; leaving."""

    name: str
    state: str
    path: str
    base: str
    rank: int
    bytes: int  # in host memory now
    generation: int
    requests: int


class _Entry:
    """One generation of a name."""

    def __init__(self, adapter: Adapter, facts: AdapterFacts, root: str | None) -> None:
        self.adapter = adapter
        self.name, self.generation, self.path, self.root = adapter.name, adapter.generation, adapter.path, root
        self.base, self.rank, self.bytes, self.stamp = facts.base, facts.rank, facts.bytes, facts.stamp
        self.stored = False  # the executor no longer holds its weights
        self.pins = 0  # sequences that use it, and requests about to
        self.leaving = False

    def row(self) -> AdapterRow:
        state = "leaving" if self.leaving else "stored" if self.stored else "ready"
        return AdapterRow(
            name=self.name,
            state=state,
            path=self.path,
            base=self.base,
            rank=self.rank,
            bytes=0 if self.stored else self.bytes,
            generation=self.generation,
            requests=self.pins,
        )


class Adapters:
    """The adapters of one engine, by name.

    read    reads an adapter, below a root, of at most so many bytes: Executor.read_adapter
    forget  called with each adapter that nobody uses or will use any more
    gone    called with each name once nothing is left of what it stood for
    events  told of what changes
    """

    def __init__(
        self,
        read: Read,
        forget: Callable[[Adapter], None],
        gone: Callable[[str], None],
        events: Events,
        *,
        host_bytes: int,
        patience: int = 64,
        taken: tuple[str, ...] = (),
    ) -> None:
        """Serve none yet.

        patience  requests for adapters in memory that may pass one that waits for room
        taken     names that are the model's own
        """
        self._read = read
        self._forget = forget
        self._gone = gone
        self._events = events
        self.host_bytes = host_bytes
        self._taken = taken
        self._entries: dict[str, _Entry] = {}
        self._by_adapter: dict[Adapter, _Entry] = {}  # in memory; the one used longest ago first
        self._generations = 0
        self._reading = asyncio.Lock()
        self._turn = asyncio.Lock()  # of the requests whose adapter is not in memory, in the order in which they came
        self._patience = patience
        self._passed = 0  # requests that have passed the one whose turn it is
        self._news = asyncio.Event()  # somebody has let go of an adapter, or a name stands for something else

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Return what the weights of all adapters take of the host's memory."""
        return sum(entry.bytes for entry in self._by_adapter.values())

    def rows(self) -> list[AdapterRow]:
        """Return all that are served, and those that are not any more but still used."""
        leaving = [entry for entry in self._by_adapter.values() if entry.leaving]
        return [entry.row() for entry in (*self._entries.values(), *leaving)]

    # What operators do

    async def load(self, name: str, path: str, *, root: str | None = None, in_place: bool = False) -> bool:
        """Serve an adapter as `name`; False if the name stands for this path already and nothing was to be done.

        root      must hold it; see files.locate
        in_place  read it, or another, again: requests that run keep what they began with

        It is checked whole before anybody can ask for it. Raises CheckpointError, AdapterExists, AdapterTooLarge.
        """
        if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{name[:LONGEST_NAME]!r} cannot be a name: letters, digits and . _ : - make one, parted by single"
                f" slashes, none of them . or .. alone, {LONGEST_NAME} characters at most"
            )
        if name in self._taken:
            raise AdapterExists(f"{name!r} is the model's own name; choose another for the adapter")
        async with self._reading:
            current = self._entries.get(name)
            if current is not None and not in_place:
                if current.path == path:
                    return False
                raise AdapterExists(f"{name!r} stands for {current.path}; replace it with --in-place, or unload it")
            self._generations += 1
            adapter = Adapter(name, self._generations, path)
            entry = self._entries[name] = _Entry(adapter, await self._make_room(adapter, root), root)
            self._by_adapter[adapter] = entry
            self._news.set()
            self._tell("loaded" if current is None else "replaced", entry, path=path, rank=entry.rank)
            if current is not None:
                self._retire(current)
        return True

    def unload(self, name: str) -> AdapterRow | None:
        """Serve no further request by that name; those that run finish. None if there is none."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        self._tell("unloaded", entry, requests=entry.pins)
        self._retire(entry)
        return entry.row()

    def row(self, name: str) -> AdapterRow:
        """Return what is served under a name. Raises ModelNotFound."""
        return self._entry(name).row()

    def users(self, name: str) -> int:
        """Return how many requests still use what a name stood for before it was replaced or unloaded."""
        return sum(entry.pins for entry in self._by_adapter.values() if entry.leaving and entry.name == name)

    async def left(self, name: str) -> None:
        """Return once all of that is freed."""
        while self.users(name):
            self._news.clear()
            await self._news.wait()

    def store(self) -> None:
        """Take all weights that nobody uses out of memory; they are read again when asked for."""
        for entry in list(self._by_adapter.values()):
            self._let_go(entry)

    # What requests do

    async def acquire(self, name: str) -> Adapter:
        """Return the adapter that `name` stands for now, in memory and kept there until `release`.

        Raises ModelNotFound, AdapterUnavailable.
        """
        entry = self._entry(name)
        if entry.stored or self._passed >= self._patience:
            return await self._acquire_in_turn(name)
        self._passed += self._turn.locked()
        self.keep(entry.adapter)
        return entry.adapter

    def keep(self, adapter: Adapter) -> None:
        """Keep an adapter that is kept already for one more user."""
        entry = self._by_adapter.pop(adapter)
        entry.pins += 1
        self._by_adapter[adapter] = entry

    def release(self, adapter: Adapter) -> None:
        """Undo one `acquire` or `keep`."""
        entry = self._by_adapter[adapter]
        entry.pins -= 1
        assert entry.pins >= 0, f"{adapter} was released more often than kept"
        self._news.set()
        if entry.leaving:
            self._part(entry)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelNotFound(name, (*self._taken, *self._entries))
        return self._entries[name]

    async def _acquire_in_turn(self, name: str) -> Adapter:
        """Wait for one's turn, and then until what `name` stands for is in memory. Who comes later waits behind."""
        async with self._turn:
            try:
                while (adapter := await self._acquire_if_it_fits(name)) is None:
                    await self._news.wait()
                return adapter
            finally:
                self._passed = 0

    async def _acquire_if_it_fits(self, name: str) -> Adapter | None:
        """Read what `name` stands for unless it is in memory; None while those in use leave it no room."""
        async with self._reading:
            entry = self._entry(name)  # it may have been unloaded, replaced or read meanwhile
            if entry.stored:
                try:
                    await self._read_again(entry)
                except AdapterTooLarge as error:
                    if error.size > self.host_bytes:
                        raise AdapterUnavailable(f"adapter {name!r} cannot be read now: {error}") from error
                    self._news.clear()
                    return None
            self.keep(entry.adapter)
            return entry.adapter

    async def _read_again(self, entry: _Entry) -> None:
        try:
            facts = await self._make_room(entry.adapter, entry.root)
        except CheckpointError as error:
            raise AdapterUnavailable(f"adapter {entry.name!r} cannot be read now: {error}") from error
        if facts.stamp != entry.stamp:
            self._forget(entry.adapter)
            raise AdapterUnavailable(
                f"the files of adapter {entry.name!r} have changed since it was loaded;"
                " an operator must load it again (infdctl load-lora --in-place)"
            )
        if entry.leaving:
            self._forget(entry.adapter)
            raise ModelNotFound(entry.name, (*self._taken, *self._entries))
        entry.stored, entry.bytes = False, facts.bytes
        self._by_adapter[entry.adapter] = entry
        self._tell("read again", entry)

    async def _make_room(self, adapter: Adapter, root: str | None) -> AdapterFacts:
        """Read an adapter, taking as many unused ones out of memory as it needs. The lock is held."""
        try:
            return await self._read(adapter, root, self.host_bytes - self.bytes)
        except AdapterTooLarge as error:
            idle = [entry for entry in self._by_adapter.values() if not entry.pins]
            if self.host_bytes - self.bytes + sum(entry.bytes for entry in idle) < error.size:
                raise
            for entry in idle:
                if self.host_bytes - self.bytes >= error.size:
                    break
                self._let_go(entry)
            return await self._read(adapter, root, self.host_bytes - self.bytes)

    def _retire(self, entry: _Entry) -> None:
        entry.leaving = True
        self._news.set()
        self._part(entry)

    def _part(self, entry: _Entry) -> None:
        """Let go of what is not served any more, once nobody uses it."""
        self._let_go(entry)
        if entry.name not in self._entries and not self.users(entry.name):
            self._gone(entry.name)

    def _let_go(self, entry: _Entry) -> None:
        """Take an entry's weights out of memory, if they are there and nobody uses them."""
        if not entry.stored and not entry.pins:
            entry.stored = True
            del self._by_adapter[entry.adapter]
            self._forget(entry.adapter)
            self._news.set()
            self._tell("freed" if entry.leaving else "stored", entry)

    def _tell(self, what: str, entry: _Entry, **facts: object) -> None:
        self._events.tell("adapter", what, name=entry.name, generation=entry.generation, bytes=entry.bytes, **facts)
