"""Recent events of the daemon, for operators who list or follow them.

A ring buffer stores the events. A follower is a position in the ring: a slow
follower misses the events that the ring has dropped, and receives their number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

Fact = str | int | float | bool | None
Kind = Literal["state", "verb", "rest", "weights", "adapter", "step", "request", "config"]

MAX_EVENTS: Final = 1024
LONGEST: Final = 256  # maximum characters of a message or a fact; some facts quote text from clients


class Event(Struct, frozen=True):
    """One event.

    seq      number of the event since the daemon started, from 1
    time     Unix time in seconds
    message  short description of the event
    facts    details of the event, by name
    """

    seq: int
    time: float
    kind: Kind
    message: str
    facts: dict[str, Fact]


class Events:
    """The latest events. Used on the event loop's thread only."""

    def __init__(self, most: int = MAX_EVENTS, clock: Callable[[], float] = time.time) -> None:
        self._ring: deque[Event] = deque(maxlen=most)
        self._clock = clock
        self._changed = asyncio.Event()
        self.last = 0  # seq of the latest event
        self.closed = False

    def publish(self, kind: Kind, message: str, /, **facts: object) -> None:
        """Record an event. A fact other than a number, a boolean or None is recorded as text."""
        self.last += 1
        plain = {name: _plain(fact) for name, fact in facts.items()}
        self._ring.append(Event(self.last, self._clock(), kind, _cut(message), plain))
        self._wake()

    async def read(self, since: int = 0, *, follow: bool = False) -> AsyncGenerator[tuple[Event, int], None]:
        """Yield the events after `since`, each with the number of dropped events before it.

        since   number of an event; a number above the latest is from an earlier process, so all events are yielded
        follow  continue with new events until `close`
        """
        seq = since if since <= self.last else 0
        while True:
            unread = min(len(self._ring), self.last - seq)
            for event in list(islice(self._ring, len(self._ring) - unread, None)):
                yield event, event.seq - seq - 1
                seq = event.seq
            while follow and self.last == seq and not self.closed:
                await self._changed.wait()
            if self.last == seq:
                return

    def close(self) -> None:
        """End every follower once it has received the remaining events."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        # Wakes all waiting followers; followers that wait later use the new asyncio.Event.
        self._changed.set()
        self._changed = asyncio.Event()


def _plain(fact: object) -> Fact:
    return fact if isinstance(fact, int | float | None) else _cut(str(fact))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
