"""What has happened to the daemon lately, for who looks later or reads along.

A ring is all that is kept. A follower is a number and has no buffer of its own:
one who lags finds what was forgotten meanwhile missing, is told how much, and
costs nobody anything.
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
Kind = Literal["state", "verb", "rest", "weights", "adapter", "step", "request"]

MOST: Final = 1024
LONGEST: Final = 256  # characters of one fact; some repeat what somebody sent


class Event(Struct, frozen=True):
    """Something that happened.

    seq    one more than that of the event before it, in one life of a daemon
    time   Unix time
    told   what it was, in a few words of ours
    facts  what there is to know of it
    """

    seq: int
    time: float
    kind: Kind
    told: str
    facts: dict[str, Fact]


class Events:
    """The latest events. All of it runs on the event loop."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.time) -> None:
        self._ring: deque[Event] = deque(maxlen=most)
        self._clock = clock
        self._news = asyncio.Event()
        self.last = 0  # number of the latest
        self.closed = False

    def tell(self, kind: Kind, told: str, /, **facts: object) -> None:
        """Something has happened. A fact that is none of the plain types is told as text."""
        self.last += 1
        plain = {name: _plain(fact) for name, fact in facts.items()}
        self._ring.append(Event(self.last, self._clock(), kind, _cut(told), plain))
        self._wake()

    async def read(self, since: int = 0, *, follow: bool = False) -> AsyncGenerator[tuple[Event, int], None]:
        """Yield the events behind a number, each with how many before it are missing.

        since   a number that this daemon has not reached is of an earlier life: then all are behind it
        follow  wait for more, until `close`
        """
        seq = since if since <= self.last else 0
        while True:
            behind = min(len(self._ring), self.last - seq)
            for event in list(islice(self._ring, len(self._ring) - behind, None)):
                yield event, event.seq - seq - 1
                seq = event.seq
            while follow and self.last == seq and not self.closed:
                await self._news.wait()
            if self.last == seq:
                return

    def close(self) -> None:
        """Let who reads along read to the end, and leave."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        # Whoever waits wakes up; whoever comes later waits for the next one.
        self._news.set()
        self._news = asyncio.Event()


def _plain(fact: object) -> Fact:
    return fact if isinstance(fact, int | float | None) else _cut(str(fact))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
