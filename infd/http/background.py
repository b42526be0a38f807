"""Responses that are generated in the background.

A background response is generated, and its events are collected, whether or not a client reads them. The store contains
it as unfinished from its start, and complete, with all events but the last, from its end. In between, the events are in
this process's memory; those of all background responses together are bounded by store.bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from infd.errors import NotStored, RequestError, ServerStopped, TooManyEvents

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from infd.config import LiveConfig
    from infd.http.formats.responses import Draft
    from infd.http.pieces import Pieces
    from infd.http.store.entry import Entry, Store


class Running(Struct, eq=False):
    """A response that is being generated. Implements `Events`: its answer is streamed to it.

    events   framed events so far, one entry for each
    size     bytes of the events
    ended    whether no more events follow
    changed  is set, and replaced, when events are added and at the end
    cause    error with which the server ended the generation early; None: the server has not
    work     the generation
    end      waits for `work`, then stores the response and closes it
    """

    entry: Entry
    draft: Draft
    owner: Background
    events: list[bytes] = field(default_factory=list)
    size: int = 0
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cause: RequestError | None = None
    work: asyncio.Task[None] | None = None
    end: asyncio.Task[None] | None = None

    begun = True
    writable = True

    def write(self, events: bytes) -> None:
        self.events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self.size += len(events)
        self._notify()
        self.owner.grow(len(events))

    async def send(self, events: bytes) -> None:
        self.write(events)

    async def send_pieces(self, events: Pieces) -> None:
        self.write(b"".join(events))

    async def cancel(self) -> None:
        """End the generation, and wait until the response is stored."""
        if self.work is not None and self.end is not None:
            self.work.cancel()
            await asyncio.wait([self.end])

    def close(self) -> None:
        self.ended = True
        self.work = None
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Background:
    """All background responses being generated, and those that could not be stored at their end, until dropped."""

    def __init__(self, store: Store, live: LiveConfig) -> None:
        self._store = store
        self._live = live
        self._running: dict[str, Running] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running)

    async def start(
        self,
        entry: Entry,
        draft: Draft,
        work: Callable[[Running], Coroutine[Any, Any, None]],
        *,
        translate: Callable[[Exception], RequestError],
        leave: Callable[[], None],
    ) -> Running:
        """Store a response as unfinished, and generate it. Raises NotStored.

        translate  converts an error of the generation to the error for the client
        leave      called once the generation has ended, for any reason
        """
        running = Running(entry, draft, self)
        self._running[entry.id] = running
        running.write(draft.event("response.created", response=draft.response))
        running.write(draft.event("response.queued", response=draft.response))
        # A separate task, so that a client that disconnects cannot cancel it between storing and generating.
        added = asyncio.create_task(self._store.add(entry))
        running.work = asyncio.create_task(_after(added, work, running))
        running.end = asyncio.create_task(self._end(running, running.work, translate, leave))
        if running.cause is not None:  # its first events exceeded the bound
            running.work.cancel()
        try:
            await asyncio.shield(added)
        except NotStored:
            self.drop(entry.id)
            raise
        return running

    def get(self, id: str, tenant: str) -> Running | None:
        running = self._running.get(id)
        return running if running is not None and running.entry.tenant == tenant else None

    def drop(self, id: str) -> Running | None:
        """Remove a response, and cancel its generation. Return the response; None if there is none."""
        if (running := self._running.pop(id, None)) is not None:
            self._bytes -= running.size
            if running.work is not None:
                running.work.cancel()
        return running

    async def settle(self, running: Running) -> None:
        """Store a response that is complete except for its last event. Raises NotStored."""
        head, events = msgspec.json.encode(running.draft.response), b"".join(running.events)

        def settled(entry: Entry) -> Entry:
            return msgspec.structs.replace(entry, head=head, events=events, unfinished=False)

        await self._store.change(running.entry.id, running.entry.tenant, settled)

    def grow(self, size: int) -> None:
        """Count further bytes of events. Beyond the bound, drop responses, oldest first."""
        self._bytes += size
        if self._bytes <= self._live.now.store.bytes:
            return
        for running in list(self._running.values()):
            if self._bytes <= self._live.now.store.bytes:
                return
            running.cause = running.cause or TooManyEvents()
            self.drop(running.entry.id)

    async def close(self) -> None:
        """End all responses as failed, and wait until they are stored."""
        ends = []
        for running in self._running.values():
            if running.work is not None and running.end is not None:
                running.cause = ServerStopped()
                running.work.cancel()
                ends.append(running.end)
        if ends:
            await asyncio.wait(ends)

    async def _end(
        self,
        running: Running,
        work: asyncio.Task[None],
        translate: Callable[[Exception], RequestError],
        leave: Callable[[], None],
    ) -> None:
        await asyncio.wait([work])
        leave()
        draft, stored = running.draft, True
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or error is not None:
            if isinstance(error, Exception):
                draft.fail(translate(error))
            elif running.cause is not None:
                draft.fail(running.cause)
            else:
                draft.break_off("cancelled")
            try:
                await self.settle(running)
            except NotStored:  # logged by the store
                stored = False
            running.write(draft.last_event())
        if stored and self._running.get(running.entry.id) is running:
            del self._running[running.entry.id]
            self._bytes -= running.size
        running.close()


async def _after(
    added: asyncio.Task[None], work: Callable[[Running], Coroutine[Any, Any, None]], running: Running
) -> None:
    await asyncio.shield(added)
    await work(running)
