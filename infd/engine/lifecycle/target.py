"""What operators wish of the engine, and what has come of it so far."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from infd.engine.lifecycle.state import State

if TYPE_CHECKING:
    from infd.memory import Part

Mode = Literal["abort", "wait", "keep"]
Arrivals = Literal["hold", "reject"]

IN_FLIGHT: Final = {
    "abort": "what is in flight is aborted",
    "wait": "what is in flight finishes first",
    "keep": "what is in flight is frozen",
}
ARRIVING: Final = {"hold": "new requests are held", "reject": "new requests are refused"}


class Target(Struct, frozen=True, kw_only=True):
    """How operators want the engine.

    mode       what becomes of the requests in flight: they end, they finish first, or they stay where they are
    new        what new requests get meanwhile: a place outside the door, or a refusal
    level      of sleep: 1 gives the cache back, 2 the weights too
    awake      what is to be in memory although it sleeps on
    by_itself  it sleeps because nobody has asked for anything
    """

    state: State = State.READY
    mode: Mode = "wait"
    new: Arrivals = "hold"
    level: int = 0
    awake: frozenset[Part] = frozenset()
    by_itself: bool = False

    @property
    def reason(self) -> str:
        if self.state is State.READY:
            return ""
        if self.state is State.PAUSED:
            return f"{IN_FLIGHT[self.mode]}, {ARRIVING[self.new]}"
        awake = "".join(f", {part.value} awake" for part in sorted(self.awake, key=lambda part: part.value))
        return f"level {self.level}{', by itself' if self.by_itself else ''}{awake}, {ARRIVING[self.new]}"


class Transition:
    """A wish on its way, or weights.

    ended        resolves when it has come true; raises what stood against it
    took_s       from the wish to its end
    aborted      choices that it ended
    frozen       choices that wait for the engine to go on
    freed_bytes  by which what the device holds, on a CPU the process, shrank
    """

    def __init__(self, target: Target, now: float) -> None:
        self.target = target
        self.began = now
        self.took_s: float | None = None
        self.aborted = 0
        self.frozen = 0
        self.freed_bytes = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, now: float, error: Exception | None = None) -> None:
        if self.ended.done():
            return
        self.took_s = now - self.began
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # nobody need be waiting for it

    @property
    def error(self) -> BaseException | None:
        return self.ended.exception() if self.ended.done() else None

    async def result(self, wait_s: float | None = None) -> bool:
        """Wait for the end, at most so long; return whether it has come. Raises what stood against the wish."""
        await asyncio.wait([self.ended], timeout=wait_s)
        return self.ended.done() and self.ended.result() is None
