"""The engine's side of an executor in a separate process, behind a socket pair.

RemoteExecutor encodes commands, resolves futures, and stores the state that the
worker last reported. The worker process runs `worker.py`. If the process ends,
the device is lost.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from infd.errors import DeviceLost
from infd.executors import wire
from infd.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from infd.config import Config
    from infd.memory import MemoryPart
    from infd.request import Adapter, AdapterFacts
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan, StepResult

ENDING_S: Final = 4.0  # seconds in which the worker must end
START: Final = 0  # `call` number of wire.Start


class WorkerProcess(Protocol):
    """The methods of asyncio.subprocess.Process that RemoteExecutor calls on the worker."""

    async def wait(self) -> int:
        """Wait for the process to end; return its exit code, or the negative number of the signal that ended it."""

    def kill(self) -> None: ...


async def worker(theirs: socket.socket) -> WorkerProcess:
    """Start the worker process; `theirs` is the worker's side of the socket pair."""
    command = (sys.executable, "-m", "infd.executors.worker", str(theirs.fileno()))
    return await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL)


class RemoteStep:
    """A step in flight."""

    __slots__ = ("_executor", "future", "number")

    def __init__(self, executor: RemoteExecutor, number: int, future: asyncio.Future[StepResult]) -> None:
        self._executor = executor
        self.number = number
        self.future = future

    def sample(self, mask: Any | None = None) -> asyncio.Future[StepResult]:
        self._executor.sample(self, mask)
        return self.future


class RemoteExecutor:
    """Implements Executor with a worker process."""

    def __init__(
        self,
        config: Callable[[], Config],
        progress: Callable[[int, int], None] = lambda done, total: None,
        journal_stream: str = "",
        spawn: Callable[[socket.socket], Awaitable[WorkerProcess]] = worker,
    ) -> None:
        """Set up; `load` starts the process.

        config          called by `load`
        progress        called with (bytes of weights read, bytes to read)
        journal_stream  the daemon's $JOURNAL_STREAM; the worker's log needs it
        spawn           starts the worker, given the worker's side of the socket pair
        """
        self.depth = self.decoding_depth = 1
        self.sleep_refusal = "the model is not loaded"
        self._config = config
        self._progress = progress
        self._spawn = spawn
        self._journal_stream = journal_stream
        self._released_by: dict[int, frozenset[MemoryPart]] = {}
        self._state = wire.State(Memory(), {"ops": []})
        self._pulse = 0
        self._steps: dict[int, asyncio.Future[StepResult]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count(START)
        self._connection: wire.Connection | None = None
        self._process: WorkerProcess | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lost: DeviceLost | None = None
        self._closing = False

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await self._spawn(theirs)
        _, self._connection = await loop.create_unix_connection(
            partial(wire.Connection, wire.Answer, self._receive), sock=ours
        )
        self._watching = loop.create_task(self._watch(lost), name="executor")
        loaded: wire.Loaded = await self._call(lambda _: wire.Start(self._config(), self._journal_stream))
        self.depth, self.decoding_depth = loaded.depth, loaded.decoding_depth
        self.sleep_refusal, self._released_by = loaded.sleep_refusal, loaded.released_by
        return loaded.capacity

    def forward(self, plan: StepPlan) -> RemoteStep:
        step = RemoteStep(self, next(self._numbers), asyncio.get_running_loop().create_future())
        if self._connection is None or self._lost is not None:
            _fail(step.future, self._lost or DeviceLost("the device's process is not running"))
        else:
            self._steps[step.number] = step.future
            self._connection.send(wire.Forward(step.number, plan))
        return step

    def sample(self, step: RemoteStep, mask: Any | None) -> None:
        """Permit a step to sample. mask: int32 array [rows, ceil(vocab / 32)]."""
        if self._connection is not None and step.number in self._steps:
            sent = (None, 0) if mask is None else (mask.tobytes(), len(mask))
            self._connection.send(wire.Sample(step.number, *sent))

    @property
    def memory(self) -> Memory:
        return self._state.memory

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        return self._released_by[min(level, max(self._released_by))]

    async def sleep(self, level: int) -> int:
        freed: int = await self._call(lambda call: wire.Sleep(call, level))
        return freed

    async def wake(self, parts: Collection[MemoryPart]) -> None:
        await self._call(lambda call: wire.Wake(call, frozenset(parts)))

    async def load_weights(self, path: str, root: str = "") -> None:
        await self._call(lambda call: wire.LoadWeights(call, path, root))

    async def read_adapter(self, adapter: Adapter, root: str | None, room: int) -> AdapterFacts:
        try:
            facts: AdapterFacts = await self._call(lambda call: wire.ReadAdapter(call, adapter, root, room))
        except asyncio.CancelledError:
            self.forget_adapter(adapter, None)
            raise
        return facts

    def forget_adapter(self, adapter: Adapter, slot: int | None) -> None:
        if self._connection is not None and self._lost is None:
            self._connection.send(wire.ForgetAdapter(adapter, slot))

    def describe(self) -> dict[str, Any]:
        return self._state.facts

    def pulse(self) -> int:
        return self._pulse

    async def close(self) -> None:
        self._closing = True
        if self._connection is None or self._process is None or self._watching is None:
            return
        if self._lost is None:
            self._connection.send(wire.Close())
        try:
            async with asyncio.timeout(ENDING_S):
                await asyncio.shield(self._watching)
        except TimeoutError:
            self._process.kill()
            await self._watching

    async def _call(self, command: Callable[[int], wire.Command]) -> Any:
        """Send a command with a `call` number, and wait for the answer.

        Returns the value of wire.Returned, or wire.Loaded itself. Raises the fault of wire.Raised.
        """
        if self._connection is None or self._lost is not None:
            raise self._lost or DeviceLost("the device's process is not running")
        call = next(self._numbers)
        self._calls[call] = answer = asyncio.get_running_loop().create_future()
        self._connection.send(command(call))
        return await answer

    async def _watch(self, lost: Callable[[DeviceLost], None] | None) -> None:
        """Wait until the process ends; then fail all steps and calls in flight and, unless closing, call `lost`."""
        assert self._connection is not None
        assert self._process is not None
        await self._connection.ended
        try:
            async with asyncio.timeout(ENDING_S):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        self._connection.close()
        if self._closing:
            self._lost = DeviceLost("the executor was closed")
        else:
            self._lost = DeviceLost(
                f"the device's process ended {f'by signal {-code}' if code < 0 else f'with {code}'}"
            )
        for future in (*self._steps.values(), *self._calls.values()):
            _fail(future, self._lost)
        self._steps.clear()
        self._calls.clear()
        if lost is not None and not self._closing:
            lost(self._lost)

    def _receive(self, answer: wire.Answer) -> None:
        match answer:
            case wire.Result(step, result):
                if not (sampled := self._steps.pop(step)).done():
                    sampled.set_result(result)
            case wire.Failed(step, fault):
                _fail(self._steps.pop(step), fault.error())
            case wire.Beat(pulse, state):
                self._pulse, self._state = pulse, state
            case wire.Progress(done, total):
                self._pulse += 1
                self._progress(done, total)
            case wire.Loaded():
                self._state = answer.state
                if not (started := self._calls.pop(START)).done():  # `load` may have been cancelled
                    started.set_result(answer)
            case wire.Returned(call, state, value):
                self._state = state
                if not (future := self._calls.pop(call)).done():
                    future.set_result(value)
            case wire.Raised(call, state, fault):
                self._state = state
                _fail(self._calls.pop(call), fault.error())


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future, and mark the exception as retrieved.

    asyncio would otherwise log it if nothing awaits the future, as happens to steps after a failed step.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()
