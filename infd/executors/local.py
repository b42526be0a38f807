"""An executor in this process: the event loop sends plans to the thread that owns the device.

Importing this module does not import torch; the device thread imports torch.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar

from infd.errors import DeviceLost
from infd.executors.device_thread import DeviceCall, DeviceStep, DeviceThread, MaySample
from infd.memory import Memory
from infd.offload import Offload
from infd.runner.arenas.host import headstart
from infd.runner.pulse import Pulse, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from infd.config import Config
    from infd.memory import MemoryPart
    from infd.request import Adapter, AdapterFacts
    from infd.runner.start.assembly import Loaded
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan, StepResult

R = TypeVar("R")

# Behind a step that samples and that an idle CPU waits for, the event loop sleeps until the device thread, which wakes
# up meanwhile, has the interpreter's lock: the loop would keep it for 0.2 to 0.4 ms more, to deliver tokens and to fill
# masks. The system rounds the time up to 0.06 ms or so. Behind a step that only pools the loop has nothing to do.
HAND_OVER_S: Final = 1e-5


def build_runner(config: Config, pulse: Pulse, progress: Callable[[int, int], None] | None = None) -> Loaded:
    """Load the configured model onto its device. Raises StartError.

    progress  called with (bytes of weights read, bytes to read)
    """
    memory = headstart(config)
    from infd.runner.start.loading import build  # imports torch

    return build(config, pulse, progress, memory)


class LocalStep(DeviceStep):
    """A step in flight."""

    __slots__ = ("_executor", "future")

    def __init__(
        self, executor: LocalExecutor, plan: StepPlan, rollbacks: int, future: asyncio.Future[StepResult]
    ) -> None:
        super().__init__(plan, rollbacks)
        self.future = future
        self._executor = executor

    def sample(self, mask: Any | None = None) -> asyncio.Future[StepResult]:
        self._executor.sample(self, mask)
        return self.future


class LocalExecutor:
    """Computes with torch, on a CPU or one GPU. `config.model.path` is a checkpoint directory."""

    def __init__(self, config: Config, build: Callable[[Config, Pulse], Loaded] = build_runner) -> None:
        self.depth = self.decoding_depth = config.device.depth or 1  # `load` sets those chosen for the device
        self._config = config
        self._build = build
        self._facts: dict[str, Any] = {"device": config.device.kind, "ops": []}
        self._pulse = Pulse()
        self._device = DeviceThread(self._answer)
        self._rollbacks = 0
        self._in_flight: set[LocalStep] = set()
        self._lost: Callable[[DeviceLost], None] | None = None
        self._closing = False
        self._whole = True
        self._calls: set[asyncio.Future[Any]] = set()
        self._offload = Offload(threads=1)
        self._model: Loaded | None = None  # its runner computes on the device thread only
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[Loaded] | None = None
        self._ended: asyncio.Future[None] | None = None

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._thread = Thread(target=self._run, name="infd-device", daemon=True)
        self._thread.start()
        loaded = await self._loaded
        self._loaded, self._model = None, loaded
        self.depth, self.decoding_depth = loaded.depth, loaded.decoding_depth
        self._facts = loaded.facts
        return loaded.capacity

    def forward(self, plan: StepPlan) -> LocalStep:
        step = LocalStep(self, plan, self._rollbacks, asyncio.get_running_loop().create_future())
        if self._ended is None or self._ended.done():
            _fail(step.future, DeviceLost("the device thread is not running"))
        elif not self._whole:  # the step would read zeros from released memory, without an error
            _fail(step.future, RuntimeError("a step was issued while memory is released"))
        else:
            self._in_flight.add(step)
            self._device.inbox.put(step)
            awaited = len(self._in_flight) == 1 and self.decoding_depth > self.depth
            if awaited and any(span.samples for span in plan.spans):
                time.sleep(HAND_OVER_S)
        return step

    def sample(self, step: LocalStep, mask: Any | None) -> None:
        """Permit a step to sample."""
        self._device.inbox.put(MaySample(step, mask))

    def between(self, work: Callable[[Loaded], R]) -> asyncio.Future[R]:
        """Run `work` on the device thread after the steps issued so far and before any later step.

        Returns a future of the result, resolved on the event loop. If `work` raises an exception, only the future
        fails; steps continue.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if self._model is None or self._ended is None or self._ended.done():
            _fail(future, DeviceLost("the device thread is not running"))
            return future
        self._calls.add(future)
        self._device.inbox.put(DeviceCall(partial(work, self._model), partial(self._post, self._returned, future)))
        return future

    @property
    def memory(self) -> Memory:
        return Memory() if self._model is None else self._model.residence.memory

    @property
    def sleep_refusal(self) -> str:
        return "the model is not loaded" if self._model is None else self._model.residence.refusal

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        assert self._model is not None
        return self._model.residence.released_by(level)

    async def sleep(self, level: int) -> int:
        return await self._change(lambda loaded: loaded.residence.sleep(level))

    async def wake(self, parts: Collection[MemoryPart]) -> None:
        await self._change(lambda loaded: loaded.residence.wake(parts))

    async def load_weights(self, path: str, root: str = "") -> None:
        await self._change(lambda loaded: loaded.residence.load(path, root))

    async def _change(self, work: Callable[[Loaded], R]) -> R:
        """Change memory on the device thread, and return the result.

        Steps issued before the change ends fail. If the caller is cancelled, steps fail until a later change ends.
        """
        self._whole = False
        done = self.between(work)
        await asyncio.wait([done])
        self._whole = self.memory.whole
        return done.result()

    async def read_adapter(self, adapter: Adapter, root: str | None, room: int) -> AdapterFacts:
        assert self._model is not None
        weights = await self._offload(self._model.reader.read, adapter.path, root, room)
        # Runs after all calls that free earlier generations, and before all plans that load this adapter.
        self.between(lambda loaded: loaded.runner.adapters.hold(adapter, weights.changes))
        return weights.facts

    def forget_adapter(self, adapter: Adapter, slot: int | None) -> None:
        self.between(lambda loaded: loaded.runner.adapters.forget(adapter, slot))

    def describe(self) -> dict[str, Any]:
        if self._model is None:
            return self._facts
        return self._facts | self._model.runner.facts() | self._model.residence.facts()

    def pulse(self) -> int:
        return self._pulse.count

    async def close(self) -> None:
        self._closing = True
        self._offload.close()
        if self._thread is None or self._ended is None:
            return
        self._pulse.stop()
        self._device.inbox.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    # On the device thread

    def _run(self) -> None:
        loaded: Loaded | None = None
        error: BaseException = DeviceLost("the executor was closed")
        try:
            loaded = self._build(self._config, self._pulse)
            loaded.residence.start_collapsing()
            self._post(self._have_loaded, loaded)
            self._device.serve(loaded.runner, loaded.idle, loaded.residence.quiet)
        except Stopped:
            pass
        except BaseException as failure:  # reported to the event loop: this thread has no other handler
            error = failure
        if loaded is not None:
            loaded.residence.close()
        self._post(self._have_ended, error)

    def _answer(self, step: DeviceStep, outcome: StepResult | Exception) -> None:
        self._post(self._settle, step, outcome)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the event loop is closed
            return

    # On the event loop

    def _have_loaded(self, loaded: Loaded) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(loaded)

    def _settle(self, step: LocalStep, outcome: StepResult | Exception) -> None:
        self._in_flight.discard(step)
        if isinstance(outcome, Exception):
            self._rollbacks = max(self._rollbacks, step.rollbacks + 1)  # later plans are made after the rollback
            _fail(step.future, outcome)
        elif not step.future.done():
            step.future.set_result(outcome)

    def _returned(self, future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
        self._calls.discard(future)
        if error is not None:
            _fail(future, error)
        elif not future.done():
            future.set_result(outcome)

    def _have_ended(self, error: BaseException) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(error)
        for step in self._in_flight:
            _fail(step.future, error)
        self._in_flight.clear()
        for call in self._calls:
            _fail(call, error)
        self._calls.clear()
        if self._ended is not None:
            self._ended.set_result(None)
        if self._lost is not None and self._model is not None and not self._closing:
            self._lost(error if isinstance(error, DeviceLost) else DeviceLost(f"the device thread ended: {error!r}"))


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future, and mark the exception as retrieved.

    asyncio would otherwise log it if nothing awaits the future, as happens to steps after a failed step.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()
