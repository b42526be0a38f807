"""Bring the engine to rest and back, as operators wish.

A verb names the state in which the engine is to be; one task moves it there.
Verbs may race: the latest wish counts, whoever waits for an earlier one is told
that it was overtaken, and wishing for what is there already changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from infd.engine.state import State
from infd.errors import InfdError, Overtaken, WrongState

if TYPE_CHECKING:
    from infd.engine.engine import Engine
    from infd.engine.loop import StepLoop

log = logging.getLogger("infd.engine")

Mode = Literal["abort", "wait", "keep"]
New = Literal["hold", "reject"]

IN_FLIGHT: Final = {
    "abort": "what was in flight is aborted",
    "wait": "what is in flight finishes first",
    "keep": "what is in flight is frozen",
}
WISHING: Final = frozenset({State.READY, State.PAUSED})  # what a wish may start from
ARRIVING: Final = {"hold": "new requests are held", "reject": "new requests are refused"}


class Wish(Struct, frozen=True, kw_only=True):
    """How operators want the engine.

    mode  what becomes of the requests in flight: they end, they finish first, or they stay where they are
    new   what new requests get meanwhile: a place outside the door, or a refusal
    """

    state: State = State.READY
    mode: Mode = "wait"
    new: New = "hold"

    @property
    def reason(self) -> str:
        return f"{IN_FLIGHT[self.mode]}, {ARRIVING[self.new]}"


class Move:
    """A wish on its way.

    ended    resolves when it has come true; raises what stood against it
    took_s   from the wish to its end
    aborted  choices that it ended
    frozen   choices that wait for the engine to go on
    """

    def __init__(self, wish: Wish, now: float) -> None:
        self.wish = wish
        self.began = now
        self.took_s: float | None = None
        self.aborted = 0
        self.frozen = 0
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

    async def result(self, wait_s: float | None = None) -> bool:
        """Wait for the end, at most so long; return whether it has come. Raises what stood against the wish."""
        await asyncio.wait([self.ended], timeout=wait_s)
        return self.ended.done() and self.ended.result() is None


class Rest:
    """The latest wish, and the task that makes it come true."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._latest: Move | None = None
        self._mover: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def pause(self, mode: Mode = "wait", new: New = "hold") -> Move:
        """Let no step run until `resume`. Raises WrongState."""
        return self._want(Wish(state=State.PAUSED, mode=mode, new=new))

    def resume(self) -> Move:
        """Be ready. Raises WrongState."""
        return self._want(Wish())

    def look(self) -> None:
        """Something has ended; the mover may wait for that."""
        self._news.set()

    def leave(self) -> bool:
        """The engine drains or has failed: wishes count no more. Return whether no step would run by itself."""
        engine = self._engine
        if self._mover is not None:
            self._mover.cancel()
        if self._latest is not None:
            self._latest.end(engine.now(), Overtaken(engine.lifecycle.state.value))
        engine.door.holds = False
        engine.door.look()
        return engine.loop is not None and engine.loop.held

    async def close(self) -> None:
        if self._mover is not None:
            self._mover.cancel()
            await asyncio.wait([self._mover])

    def _want(self, wish: Wish) -> Move:
        """Take in a wish, and see to it that somebody is at work on it."""
        engine, latest, now = self._engine, self._latest, self._engine.now()
        if engine.lifecycle.state not in WISHING:
            raise WrongState(engine.lifecycle.state.value, engine.lifecycle.reason)
        known = Wish() if latest is None else latest.wish
        if latest is not None and known == wish and not latest.ended.done():
            return latest
        self._latest = move = Move(wish, now)
        if known == wish and (latest is None or latest.ended.exception() is None):
            move.end(now)
            return move
        if latest is not None:
            latest.end(now, Overtaken(wish.state.value))
        if wish.state is State.PAUSED:
            engine.door.holds = wish.new == "hold"
            engine.lifecycle.enter(State.PAUSED, wish.reason)
            engine.door.look()
            if wish.mode != "wait":
                self._steps.hold()
        self._news.set()
        if self._mover is None or self._mover.done():
            self._mover = asyncio.get_running_loop().create_task(self._work(), name="rest")
        return move

    async def _work(self) -> None:
        """Make the latest wish come true, and each that overtakes it meanwhile."""
        while (move := self._latest) is not None and not move.ended.done():
            error: Exception | None = None
            try:
                await self._approach(move)
            except Overtaken:
                continue
            except Exception as failure:
                error = failure
                if not isinstance(failure, InfdError):
                    log.exception("the engine could not be made %s", move.wish.state.value)
            if move is self._latest:
                move.end(self._engine.now(), error)
                self._tell(move)

    async def _approach(self, move: Move) -> None:
        engine, wish = self._engine, move.wish
        if wish.state is State.READY:
            engine.lifecycle.enter(State.READY)
            self._steps.go()
            engine.door.look()
            return
        await self._stand_still(move)

    async def _stand_still(self, move: Move) -> None:
        """Return once no step runs, and none will. Raises Overtaken."""
        engine, steps = self._engine, self._steps
        if move.wish.mode == "abort":
            move.aborted = engine.abort_all()
        elif move.wish.mode == "wait":
            steps.go()
            while engine.unfinished:
                self._news.clear()
                await self._news.wait()
                if self._latest is not move:
                    raise Overtaken(move.wish.state.value)
            steps.hold()
        await steps.settled()
        move.frozen = engine.unfinished

    @property
    def _steps(self) -> StepLoop:
        assert self._engine.loop is not None, "no wish is taken before the model is loaded"
        return self._engine.loop

    @staticmethod
    def _tell(move: Move) -> None:
        wish, error = move.wish, move.ended.exception()
        fields: dict[str, object] = {"took_s": move.took_s, "aborted": move.aborted, "frozen": move.frozen}
        if wish.state is not State.READY:
            fields |= {"mode": wish.mode, "new": wish.new}
        if error is None:
            log.info("%s, as asked", wish.state.value, extra=fields)
        else:
            log.error("not %s, as asked: %s", wish.state.value, error, extra=fields)
