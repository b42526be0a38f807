"""Pause, resume, sleep and wake the engine.

Each command sets a target; one task moves the engine to the latest target.
Commands may race: a later target ends the transition to an earlier target with
Overtaken. A target that is already reached changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from infd.engine.lifecycle.idleness import Idleness
from infd.engine.lifecycle.state import State
from infd.engine.lifecycle.target import IN_FLIGHT, Target, Transition
from infd.errors import Busy, CannotSleep, InfdError, Overtaken, WeightsInvalid, WrongState
from infd.memory import ALL

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from infd.config import LiveConfig
    from infd.engine.admission.admission import Admission
    from infd.engine.core import EngineCore
    from infd.engine.lifecycle.memory import ModelMemory
    from infd.engine.lifecycle.state import Lifecycle
    from infd.engine.lifecycle.target import Mode, NewRequests
    from infd.engine.telemetry import Telemetry
    from infd.memory import MemoryPart

log = logging.getLogger("infd.engine")

TARGETABLE: Final = frozenset({State.READY, State.PAUSED, State.SLEEPING})  # states in which a target may be set


class LifecycleControl:
    """The latest target, and the task that moves the engine to that target."""

    def __init__(
        self,
        live: LiveConfig,
        lifecycle: Lifecycle,
        core: EngineCore,
        admission: Admission,
        memory: ModelMemory,
        telemetry: Telemetry,
    ) -> None:
        self._live = live
        self._lifecycle = lifecycle
        self._core = core
        self._admission = admission
        self._gate = admission.gate
        self._memory = memory
        self._events = telemetry.events
        self._now = telemetry.now
        self._reached = Target()  # the last target reached, or the state in which a failed transition ended
        self._before_sleep = Target()
        self._latest: Transition | None = None
        self._transition_task: asyncio.Task[None] | None = None
        self._load_task: asyncio.Task[None] | None = None
        self._idleness = Idleness(lifecycle, core, admission, telemetry.now)
        self.idle_s = 0.0  # seconds without a request in the current state

    # Commands

    def pause(self, mode: Mode = "wait", new: NewRequests | None = None) -> Transition:
        """Run no step until `resume`. A sleeping engine is woken first. Raises WrongState.

        mode  whether requests in flight are aborted, finish first, or are frozen
        new   whether new requests wait at the gate or are refused; None: "reject" with mode "abort", else "hold"
        """
        new = new or ("reject" if mode == "abort" else "hold")
        return self._set_target(Target(state=State.PAUSED, mode=mode, new=new))

    def sleep(self, mode: Mode = "wait", level: int = 1, *, by_itself: bool = False) -> Transition:
        """Pause, and release memory; frozen requests are recomputed later. Raises WrongState, CannotSleep."""
        if refusal := self._memory.sleep_refusal:
            raise CannotSleep(refusal)
        now = self.target
        if now.state is not State.SLEEPING:
            self._before_sleep = now
        new = self._before_sleep.new  # requests that the pause holds at the gate stay there
        if self._before_sleep.state is State.READY:
            new = "hold" if by_itself or self._live.now.server.wake_on_request else "reject"
        level = max(level, now.level)
        return self._set_target(Target(state=State.SLEEPING, mode=mode, new=new, level=level, by_itself=by_itself))

    def wake(self, parts: frozenset[MemoryPart] = ALL) -> Transition:
        """Restore `parts`; once all memory is restored, return to the state before the sleep. Raises WrongState."""
        return self._restore_and_set_target(parts, self._before_sleep)

    def resume(self, parts: frozenset[MemoryPart] = ALL) -> Transition:
        """Restore `parts`; once all memory is restored, enter READY. Raises WrongState."""
        return self._restore_and_set_target(parts, Target())

    def load_weights(self, path: str) -> Transition:
        """Start loading the weights of the checkpoint at `path`. Raises WrongState, Busy.

        The transition ends with WrongState unless steps are held and no step is in flight.
        """
        self._require_targetable()
        if self._load_task is not None and not self._load_task.done():
            raise Busy("weights are being loaded already; wait for their load, see `infdctl status`")
        transition = Transition(self.target, self._now())
        self._load_task = self._start(self._load(transition, path), "weights")
        return transition

    def _restore_and_set_target(self, parts: frozenset[MemoryPart], awake_target: Target) -> Transition:
        now = self.target
        if now.state is not State.SLEEPING:
            return self._set_target(now if awake_target is self._before_sleep else awake_target)
        released = self._memory.released_by(now.level) - now.awake
        if self._reached == now:
            released &= self._memory.released
        return self._set_target(awake_target if released <= parts else replace(now, awake=now.awake | parts))

    # Called by other parts of the engine

    @property
    def target(self) -> Target:
        """The latest target; if its transition failed, the last target reached."""
        latest = self._latest
        return self._reached if latest is None or latest.error is not None else latest.target

    @property
    def level(self) -> int:
        """The requested level of sleep, 1 or 2; 0 unless the engine is asleep."""
        if self._lifecycle.state is not State.SLEEPING:
            return 0
        return max(self._reached.level, self.target.level)

    @property
    def changing_memory(self) -> bool:
        return self._memory.changing

    @property
    def wakes_on_request(self) -> bool:
        """Whether the engine sleeps, and the next request wakes it."""
        now = self.target
        wakes = self._live.now.server.wake_on_request or now.by_itself
        return now.state is State.SLEEPING and self._before_sleep.state is State.READY and wakes

    def on_request(self) -> None:
        """Wake the engine for a new request if `wakes_on_request`."""
        if self.wakes_on_request and self._lifecycle.state in TARGETABLE:
            self.wake()

    def sleep_if_idle(self) -> None:
        """Sleep after `server.idle_sleep_s` without a request. Called about once a second."""
        self.idle_s = self._idleness.observe()
        settings = self._live.now.server
        if settings.idle_sleep_s is None or self._lifecycle.state is not State.READY or self._memory.sleep_refusal:
            return
        if self.idle_s >= settings.idle_sleep_s:
            self.sleep(level=settings.idle_sleep_level, by_itself=True)

    def stop(self) -> bool:
        """Cancel all transitions and hold no more requests at the gate. Return whether steps remain held.

        Called when the engine drains, has failed or is closed.
        """
        for task in (self._transition_task, self._load_task):
            if task is not None:
                task.cancel()
        if self._latest is not None:
            self._latest.end(self._now(), Overtaken(self._lifecycle.state.value))
        self._gate.holds = False
        self._gate.recheck()
        return self._core.loop.held

    async def close(self) -> None:
        """Stop, and wait for the tasks to end."""
        self.stop()
        if tasks := [task for task in (self._transition_task, self._load_task) if task is not None]:
            await asyncio.wait(tasks)

    # Transitions

    def _set_target(self, target: Target) -> Transition:
        """Set the target, and start the task that moves the engine to the target."""
        latest, now = self._latest, self._now()
        self._require_targetable()
        known = self.target
        if latest is not None and known == target and not latest.ended.done():
            return latest
        self._latest = transition = Transition(target, now)
        if known == target and (latest is None or latest.error is None):
            transition.end(now)
            return transition
        if latest is not None:
            latest.end(now, Overtaken(target.state.value))
        self._gate.holds = target.new == "hold"
        if target.state is not State.READY:
            if self._lifecycle.state is not State.SLEEPING:
                reason = "" if target.state is State.PAUSED else f"falling asleep, {IN_FLIGHT[target.mode]}: "
                self._lifecycle.enter(State.PAUSED, reason + target.reason)
            if target.mode != "wait":
                self._core.loop.hold()
        self._gate.recheck()
        self._core.ended.set()  # wakes `_hold_steps`, which then raises Overtaken
        if self._transition_task is None or self._transition_task.done():
            self._transition_task = self._start(self._run_transitions(), "lifecycle")
        return transition

    async def _run_transitions(self) -> None:
        """Move the engine to the latest target, again for each later target set meanwhile."""
        while (transition := self._latest) is not None and not transition.ended.done():
            error: Exception | None = None
            try:
                await self._move_to(transition)
            except Overtaken:
                continue
            except Exception as failure:
                error = failure
                if not isinstance(failure, InfdError):
                    log.exception("the engine could not be made %s", transition.target.state.value)
            if transition is not self._latest:
                continue
            transition.end(self._now(), error)
            if error is None:
                self._reached = transition.target
            else:
                self._fall_back(error)
            self._report(transition)

    async def _move_to(self, transition: Transition) -> None:
        """Move the engine to a target. Raises Overtaken, or the error of the failed part."""
        target = transition.target
        if target.state is State.READY:
            await self._start_steps(transition)
            self._lifecycle.enter(State.READY)
            self._gate.recheck()
        elif target.state is State.PAUSED:
            if self._lifecycle.state is State.SLEEPING:
                await self._memory.restore(ALL)
                self._require_latest(transition)
            self._lifecycle.enter(State.PAUSED, target.reason)
            await self._hold_steps(transition)
        else:
            await self._enter_sleep(transition)

    async def _enter_sleep(self, transition: Transition) -> None:
        target = transition.target
        if self._lifecycle.state is not State.SLEEPING:
            await self._hold_steps(transition)
            self._lifecycle.enter(State.SLEEPING, target.reason)
        elif target.mode == "abort":
            transition.aborted = self._admission.abort_all()
        if target.awake:
            await self._memory.restore(target.awake)
        else:
            transition.freed_bytes = await self._memory.release(target.level)
        self._lifecycle.enter(State.SLEEPING, target.reason)
        transition.frozen = self._admission.unfinished

    async def _hold_steps(self, transition: Transition) -> None:
        """Abort, finish or freeze the requests in flight, as the target's mode says; return once no step runs.

        Raises Overtaken.
        """
        admission, loop = self._admission, self._core.loop
        if transition.target.mode == "abort":
            transition.aborted = admission.abort_all()
        elif transition.target.mode == "wait":
            if admission.unfinished:
                await self._start_steps(transition)
            while admission.unfinished:
                self._core.ended.clear()
                await self._core.ended.wait()
                self._require_latest(transition)
            loop.hold()
        await loop.settled()
        transition.frozen = admission.unfinished

    async def _start_steps(self, transition: Transition) -> None:
        """Resume steps once all memory is restored. Raises Overtaken, WeightsInvalid."""
        await self._memory.restore(ALL)
        self._require_latest(transition)
        if self._memory.invalid:
            raise WeightsInvalid
        self._core.loop.resume()

    async def _load(self, transition: Transition, path: str) -> None:
        """Replace the weights, and end `transition`."""
        lifecycle = self._lifecycle
        error: Exception | None = None
        try:
            await self._memory.load_weights(path, self._live.now.model.weights_root)
        except asyncio.CancelledError:
            transition.end(self._now(), Overtaken(lifecycle.state.value))
            raise
        except Exception as failure:
            error = failure
            if not isinstance(failure, InfdError):
                log.exception("weights could not be loaded")
        if self._memory.invalid and lifecycle.state in TARGETABLE:
            lifecycle.enter(lifecycle.state, str(WeightsInvalid()))
        elif error is None and lifecycle.state in TARGETABLE:
            lifecycle.enter(lifecycle.state, self._reached.reason)
        transition.end(self._now(), error)
        fields: dict[str, object] = {"path": path, "took_s": transition.took_s}
        self._events.publish("weights", "loaded" if error is None else "not loaded", **fields, **_error_field(error))
        if error is None:
            log.info("weights loaded", extra=fields)
        else:
            log.error("weights were not loaded: %s", error, extra=fields)

    def _fall_back(self, error: Exception) -> None:
        """After a failed transition, enter SLEEPING if memory is released, otherwise PAUSED.

        Steps are held, and the requests at the gate are refused.
        """
        if self._memory.released:
            if self._reached.state is not State.SLEEPING:
                self._reached = Target(state=State.SLEEPING, mode="keep", new="reject", level=1)
            self._lifecycle.enter(State.SLEEPING, f"could not wake: {error}")
        else:
            self._reached = Target(state=State.PAUSED, mode="keep", new=self._reached.new)
            self._lifecycle.enter(State.PAUSED, str(error))
        self._core.loop.hold()
        self._gate.holds = self._reached.new == "hold"
        self._gate.refuse_all(str(error))

    def _require_targetable(self) -> None:
        if self._lifecycle.state not in TARGETABLE:
            raise WrongState(self._lifecycle.state.value, self._lifecycle.reason)

    def _require_latest(self, transition: Transition) -> None:
        if self._latest is not transition:
            raise Overtaken(transition.target.state.value)

    @staticmethod
    def _start(work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    def _report(self, transition: Transition) -> None:
        target, error = transition.target, transition.error
        fields: dict[str, object] = {
            "took_s": transition.took_s,
            "aborted": transition.aborted,
            "frozen": transition.frozen,
        }
        if target.state is not State.READY:
            fields |= {"mode": target.mode, "new": target.new}
        if target.state is State.SLEEPING:
            fields |= {"level": target.level, "freed_bytes": transition.freed_bytes, "by_itself": target.by_itself}
        outcome = target.state.value if error is None else f"not {target.state.value}"
        self._events.publish("rest", outcome, **fields, **_error_field(error))
        if error is None:
            log.info("the engine is %s", target.state.value, extra=fields)
        else:
            log.error("the engine is not %s: %s", target.state.value, error, extra=fields)


def _error_field(error: BaseException | None) -> dict[str, object]:
    return {} if error is None else {"error": error}
