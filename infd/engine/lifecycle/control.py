"""Bring the engine to rest and back, as operators wish.

A verb names the state in which the engine is to be; one task moves it there.
Verbs may race: the latest wish counts, whoever waits for an earlier one is told
that it was overtaken, and wishing for what is there already changes nothing.

A sleeping arena computes zeros without a word, so steps are held before memory
is given back and go on only when all of it is there again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from infd.engine.lifecycle.state import State
from infd.engine.lifecycle.target import IN_FLIGHT, Target, Transition
from infd.errors import Busy, CannotSleep, InfdError, Overtaken, WeightsInvalid, WrongState
from infd.memory import ALL, Held, Part

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from infd.config import Config
    from infd.engine.engine import Engine
    from infd.engine.lifecycle.target import Arrivals, Mode
    from infd.engine.steps.loop import StepLoop

log = logging.getLogger("infd.engine")

WISHING: Final = frozenset({State.READY, State.PAUSED, State.SLEEPING})  # what a wish may start from


class LifecycleControl:
    """The latest wish, and the task that makes it come true."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._settings = config.server
        self._settled = Target()  # the last wish that came true, or what was left of one that did not
        self._waking = Target()  # what it was before it slept
        self._latest: Transition | None = None
        self._mover: asyncio.Task[None] | None = None
        self._loader: asyncio.Task[None] | None = None
        self._memory = asyncio.Lock()  # whoever changes what is in memory, or starts steps that need it
        self._news = asyncio.Event()
        self._idle: tuple[int, float] | None = None  # choices accepted, and since when there was nothing to do

    # Verbs

    def pause(self, mode: Mode = "wait", new: Arrivals | None = None) -> Transition:
        """Let no step run until `resume`. What sleeps is woken first. Raises WrongState.

        new  where nothing is said, who comes is held, or refused if those before were aborted
        """
        new = new or ("reject" if mode == "abort" else "hold")
        return self._want(Target(state=State.PAUSED, mode=mode, new=new))

    def sleep(self, mode: Mode = "wait", level: int = 1, *, by_itself: bool = False) -> Transition:
        """Come to rest as `pause` does, and give memory back; what is kept is computed anew. Raises WrongState."""
        if refusal := self._engine.executor.sleepless:
            raise CannotSleep(refusal)
        now = self.target
        if now.state is not State.SLEEPING:
            self._waking = now
        new = self._waking.new  # whoever is held was promised an answer
        if self._waking.state is State.READY:
            new = "hold" if by_itself or self._settings.wake_on_request else "reject"
        level = max(level, now.level)
        return self._want(Target(state=State.SLEEPING, mode=mode, new=new, level=level, by_itself=by_itself))

    def wake(self, parts: frozenset[Part] = ALL) -> Transition:
        """Be again what it was before it slept, once all parts are back. Raises WrongState."""
        return self._rouse(parts, self._waking)

    def resume(self, parts: frozenset[Part] = ALL) -> Transition:
        """Be ready, once all parts are back. Raises WrongState."""
        return self._rouse(parts, Target())

    def load_weights(self, path: str) -> Transition:
        """Put other weights in place, while no step runs. Raises WrongState, Busy."""
        self._require_state()
        if self._loader is not None and not self._loader.done():
            raise Busy("weights are being loaded already; wait for that, see `infdctl status`")
        move = Transition(self.target, self._engine.now())
        self._loader = self._begin(self._load(move, path), "weights")
        return move

    def _rouse(self, parts: frozenset[Part], then: Target) -> Transition:
        now = self.target
        if now.state is not State.SLEEPING:
            return self._want(now if then is self._waking else then)
        gone = self._engine.executor.gives_back(now.level) - now.awake
        if self._settled == now:
            gone &= self._engine.executor.memory.released
        return self._want(then if gone <= parts else replace(now, awake=now.awake | parts))

    # What others tell, and ask

    @property
    def target(self) -> Target:
        """What it is to be, as far as that is still possible."""
        latest = self._latest
        return self._settled if latest is None or latest.error is not None else latest.target

    @property
    def level(self) -> int:
        """How deep it sleeps, 1 or 2, as asked for; 0 while it does not, or not yet."""
        if self._engine.lifecycle.state is not State.SLEEPING:
            return 0
        return max(self._settled.level, self.target.level)

    @property
    def at_work(self) -> bool:
        """Whether memory is being changed."""
        return self._memory.locked()

    @property
    def wakes_on_request(self) -> bool:
        """Whether it sleeps, and the next request would make it ready."""
        now = self.target
        wakes = self._settings.wake_on_request or now.by_itself
        return now.state is State.SLEEPING and self._waking.state is State.READY and wakes

    def knock(self) -> None:
        """Somebody is at the door."""
        if self.wakes_on_request and self._engine.lifecycle.state in WISHING:
            self.wake()

    def look(self) -> None:
        """Something has ended; the mover may wait for that."""
        self._news.set()

    def watch(self) -> None:
        """Fall asleep when there has been nothing to do for long. Called about once a second."""
        engine, idle_s = self._engine, self._settings.idle_sleep_s
        if idle_s is None or engine.lifecycle.state is not State.READY or engine.executor.sleepless:
            return
        if engine.tickets or self._idle is None or self._idle[0] != engine.accepted:
            self._idle = engine.accepted, engine.now()
        elif engine.now() - self._idle[1] >= idle_s:
            self._idle = None
            self.sleep(level=self._settings.idle_sleep_level, by_itself=True)

    def leave(self) -> bool:
        """The engine drains or has failed: wishes count no more. Return whether no step would run by itself."""
        engine = self._engine
        for task in (self._mover, self._loader):
            if task is not None:
                task.cancel()
        if self._latest is not None:
            self._latest.end(engine.now(), Overtaken(engine.lifecycle.state.value))
        engine.gate.holds = False
        engine.gate.look()
        return engine.loaded and self._steps.held

    async def close(self) -> None:
        """Leave, and wait for the tasks to end."""
        self.leave()
        if tasks := [task for task in (self._mover, self._loader) if task is not None]:
            await asyncio.wait(tasks)

    # From wish to truth

    def _want(self, wish: Target) -> Transition:
        """Take in a wish, and see to it that somebody is at work on it."""
        engine, latest, now = self._engine, self._latest, self._engine.now()
        self._require_state()
        known = self.target
        if latest is not None and known == wish and not latest.ended.done():
            return latest
        self._latest = move = Transition(wish, now)
        if known == wish and (latest is None or latest.error is None):
            move.end(now)
            return move
        if latest is not None:
            latest.end(now, Overtaken(wish.state.value))
        engine.gate.holds = wish.new == "hold"
        if wish.state is not State.READY:
            if engine.lifecycle.state is not State.SLEEPING:
                falling = "" if wish.state is State.PAUSED else f"falling asleep, {IN_FLIGHT[wish.mode]}: "
                engine.lifecycle.enter(State.PAUSED, falling + wish.reason)
            if wish.mode != "wait":
                self._steps.hold()
        engine.gate.look()
        self._news.set()
        if self._mover is None or self._mover.done():
            self._mover = self._begin(self._work(), "rest")
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
                    log.exception("the engine could not be made %s", move.target.state.value)
            if move is not self._latest:
                continue
            move.end(self._engine.now(), error)
            if error is None:
                self._settled = move.target
            else:
                self._fall_back(error)
            self._tell(move)

    async def _approach(self, move: Transition) -> None:
        engine, wish = self._engine, move.target
        if wish.state is State.READY:
            await self._go(move)
            engine.lifecycle.enter(State.READY)
            engine.gate.look()
        elif wish.state is State.PAUSED:
            if engine.lifecycle.state is State.SLEEPING:
                await self._take_back(ALL)
                self._require_latest(move)
            engine.lifecycle.enter(State.PAUSED, wish.reason)
            await self._stand_still(move)
        else:
            await self._sleep(move)

    async def _sleep(self, move: Transition) -> None:
        engine, wish = self._engine, move.target
        if engine.lifecycle.state is not State.SLEEPING:
            await self._stand_still(move)
            engine.lifecycle.enter(State.SLEEPING, wish.reason)
        elif wish.mode == "abort":
            move.aborted = engine.abort_all()
        if wish.awake:
            await self._take_back(wish.awake)
        else:
            if wish.level > 1:
                engine.adapters.store()  # like weights: read again when they are asked for
            async with self._memory:
                try:
                    move.freed_bytes = await engine.executor.sleep(wish.level)
                finally:
                    if Part.CACHE in engine.executor.memory.released:  # it may have failed before, or behind that
                        engine.core.forget_prefixes(preempting=True)
        engine.lifecycle.enter(State.SLEEPING, wish.reason)
        move.frozen = engine.unfinished

    async def _stand_still(self, move: Transition) -> None:
        """Return once no step runs, and none will. Raises Overtaken."""
        engine, steps = self._engine, self._steps
        if move.target.mode == "abort":
            move.aborted = engine.abort_all()
        elif move.target.mode == "wait":
            if engine.unfinished:
                await self._go(move)
            while engine.unfinished:
                self._news.clear()
                await self._news.wait()
                self._require_latest(move)
            steps.hold()
        await steps.settled()
        move.frozen = engine.unfinished

    async def _go(self, move: Transition) -> None:
        """Let steps run again, once all that they need is there."""
        await self._take_back(ALL)
        self._require_latest(move)
        if self._engine.executor.memory.weights is Held.INVALID:
            raise WeightsInvalid
        self._steps.go()

    async def _take_back(self, parts: frozenset[Part]) -> None:
        """Have these in memory."""
        engine = self._engine
        async with self._memory:
            missing = parts & engine.executor.memory.released
            if missing:
                engine.lifecycle.enter(State.SLEEPING, "waking")
                await engine.executor.wake(missing)

    async def _load(self, move: Transition, path: str) -> None:
        """Put the weights of another checkpoint in place, or end `move` with what stands against it."""
        engine = self._engine
        error: Exception | None = None
        try:
            async with self._memory:
                self._require_stillness()
                await engine.executor.load_weights(path)
                # Frozen sequences keep what they have computed with the old weights; nobody else may find it.
                engine.core.forget_prefixes(preempting=False)
        except asyncio.CancelledError:
            move.end(engine.now(), Overtaken(engine.lifecycle.state.value))
            raise
        except Exception as failure:
            error = failure
            if not isinstance(failure, InfdError):
                log.exception("weights could not be loaded")
        if engine.executor.memory.weights is Held.INVALID and engine.lifecycle.state in WISHING:
            engine.lifecycle.enter(engine.lifecycle.state, str(WeightsInvalid()))
        elif error is None and engine.lifecycle.state in WISHING:
            engine.lifecycle.enter(engine.lifecycle.state, self._settled.reason)
        move.end(engine.now(), error)
        fields: dict[str, object] = {"path": path, "took_s": move.took_s}
        engine.events.tell("weights", "loaded" if error is None else "not loaded", **fields, **_because(error))
        if error is None:
            log.info("weights loaded", extra=fields)
        else:
            log.error("weights were not loaded: %s", error, extra=fields)

    def _fall_back(self, error: Exception) -> None:
        """A wish could not come true: stay at rest, as far as the engine has come."""
        engine, memory = self._engine, self._engine.executor.memory
        if memory.released:
            if self._settled.state is not State.SLEEPING:
                self._settled = Target(state=State.SLEEPING, mode="keep", new="reject", level=1)
            engine.lifecycle.enter(State.SLEEPING, f"could not wake: {error}")
        else:
            self._settled = Target(state=State.PAUSED, mode="keep", new=self._settled.new)
            engine.lifecycle.enter(State.PAUSED, str(error))
        self._steps.hold()
        engine.gate.holds = self._settled.new == "hold"
        engine.gate.turn_away(str(error))

    def _require_state(self) -> None:
        life = self._engine.lifecycle
        if life.state not in WISHING:
            raise WrongState(life.state.value, life.reason)

    def _require_latest(self, move: Transition) -> None:
        if self._latest is not move:
            raise Overtaken(move.target.state.value)

    def _require_stillness(self) -> None:
        life, steps = self._engine.lifecycle, self._steps
        if life.state is State.READY or not steps.held or steps.in_flight:
            raise WrongState(life.state.value, life.reason, "wait for `infdctl pause --wait` first")

    @property
    def _steps(self) -> StepLoop:
        return self._engine.core.loop

    @staticmethod
    def _begin(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    def _tell(self, move: Transition) -> None:
        wish, error = move.target, move.error
        fields: dict[str, object] = {"took_s": move.took_s, "aborted": move.aborted, "frozen": move.frozen}
        if wish.state is not State.READY:
            fields |= {"mode": wish.mode, "new": wish.new}
        if wish.state is State.SLEEPING:
            fields |= {"level": wish.level, "freed_bytes": move.freed_bytes, "by_itself": wish.by_itself}
        told = wish.state.value if error is None else f"not {wish.state.value}"
        self._engine.events.tell("rest", told, **fields, **_because(error))
        if error is None:
            log.info("%s, as asked", wish.state.value, extra=fields)
        else:
            log.error("not %s, as asked: %s", wish.state.value, error, extra=fields)


def _because(error: BaseException | None) -> dict[str, object]:
    return {} if error is None else {"error": error}
