"""The worker process of a RemoteExecutor: one executor, driven by commands from a socket.

Run as `python -m infd.executors.worker DESCRIPTOR`. The worker ends at
wire.Close, or when the daemon's side of the socket closes. Signals are ignored:
the daemon handles them and ends the worker through the socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvloop

from infd.errors import DeviceLost, Fault, InfdError
from infd.executors import wire
from infd.executors.local import LocalExecutor, build_runner
from infd.executors.remote import START
from infd.memory import use_one_heap
from infd.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from infd.engine.executor import Executor
    from infd.scheduler.plan import StepResult

    Progress = Callable[[int, int], None]
    Build = Callable[[wire.Start, Progress], Executor]

BEAT_S: Final = 0.25  # seconds between two reports of the pulse
LEVELS: Final = (1, 2)  # levels of sleep


def local(start: wire.Start, progress: Progress) -> Executor:
    """Return an executor with a device thread in this process; send the log to the daemon's destination."""
    log.configure(start.config.log, start.journal_stream)
    return LocalExecutor(start.config, partial(build_runner, progress=progress))


class Worker:
    """Runs commands on an executor and sends their answers. The first command, wire.Start, builds the executor."""

    def __init__(self, build: Build) -> None:
        self._loop = asyncio.get_running_loop()
        self.connection = wire.Connection(wire.Command, self._receive)
        self.closed: asyncio.Future[None] = self._loop.create_future()  # resolves at wire.Close
        self._build = build
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps: dict[int, Any] = {}
        self._executor: Executor | None = None

    @property
    def executor(self) -> Executor:
        assert self._executor is not None, "the first command starts the executor"
        return self._executor

    async def run(self) -> None:
        """Answer commands until wire.Close, then free all memory; return at once if the other side closes first."""
        self._begin(self._beat())
        await asyncio.wait((self.closed, self.connection.ended), return_when=asyncio.FIRST_COMPLETED)
        if self.closed.done() and self._executor is not None:
            await self._executor.close()
        for task in self._tasks:
            task.cancel()
        self.connection.close()

    async def _beat(self) -> None:
        """Report the pulse and the state whenever they have changed."""
        known = None
        while True:
            await asyncio.sleep(BEAT_S)
            if self._executor is not None and (now := wire.Beat(self.executor.pulse(), self._state())) != known:
                known = now
                self.connection.send(now)

    def _receive(self, command: wire.Command) -> None:
        match command:
            case wire.Start():
                self._executor = self._build(command, self._report)
                self._begin(self._answer(START, self._load()))
            case wire.Forward(step, plan):
                self._steps[step] = self.executor.forward(plan)
            case wire.Sample(step, mask, rows):
                result = self._steps.pop(step).sample(None if mask is None else _bitmask(mask, rows))
                result.add_done_callback(partial(self._sampled, step))
            case wire.Sleep(call, level):
                self._begin(self._answer(call, self.executor.sleep(level)))
            case wire.Wake(call, parts):
                self._begin(self._answer(call, self.executor.wake(parts)))
            case wire.LoadWeights(call, path, root):
                self._begin(self._answer(call, self.executor.load_weights(path, root)))
            case wire.ReadAdapter(call, adapter, root, room):
                self._begin(self._answer(call, self.executor.read_adapter(adapter, root, room)))
            case wire.ForgetAdapter(adapter, slot):
                self.executor.forget_adapter(adapter, slot)
            case wire.Close():
                self.closed.set_result(None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> wire.Loaded:
        executor = self.executor
        capacity = await executor.load(self._lose)
        by_level = {level: executor.released_by(level) for level in LEVELS}
        return wire.Loaded(
            capacity, executor.depth, executor.decoding_depth, executor.sleep_refusal, by_level, self._state()
        )

    async def _answer(self, call: int, work: Coroutine[Any, Any, Any]) -> None:
        """Send a call's result or its exception."""
        try:
            value = await work
        except Exception as error:  # the caller's `_call` raises the error
            if not isinstance(error, InfdError):
                logging.getLogger("infd.executors").exception("a call failed")
            self.connection.send(wire.Raised(call, self._state(), Fault.of(error)))
        else:
            self.connection.send(value if isinstance(value, wire.Loaded) else wire.Returned(call, self._state(), value))

    def _sampled(self, step: int, result: asyncio.Future[StepResult]) -> None:
        if (error := result.exception()) is None:
            self.connection.send(wire.Result(step, result.result()))
        else:
            if not isinstance(error, InfdError):
                logging.getLogger("infd.executors").error("a step failed", exc_info=error)
            self.connection.send(wire.Failed(step, Fault.of(error)))

    def _lose(self, error: DeviceLost) -> None:
        logging.getLogger("infd.executors").critical("the device is lost: %s", error)
        self.connection.close()

    def _report(self, done: int, total: int) -> None:
        """Send wire.Progress. Called on the device thread."""
        self._loop.call_soon_threadsafe(self.connection.send, wire.Progress(done, total))

    def _state(self) -> wire.State:
        return wire.State(self.executor.memory, self.executor.describe())


async def serve(ours: socket.socket, build: Build) -> int:
    """Answer commands from a socket until wire.Close arrives or the other side closes. Return the exit code."""
    worker = Worker(build)
    await asyncio.get_running_loop().create_unix_connection(lambda: worker.connection, sock=ours)
    await worker.run()
    return os.EX_OK if worker.closed.done() else os.EX_SOFTWARE


def main(build: Build = local) -> None:
    """Serve the socket whose descriptor is the last command-line argument."""
    use_one_heap()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(serve(socket.socket(fileno=int(sys.argv[-1])), build))
        os._exit(code)  # skips cleanup, which a device thread stuck in native code could block


def _bitmask(mask: bytes, rows: int) -> Any:
    import numpy as np

    return np.frombuffer(mask, np.int32).reshape(rows, -1)


if __name__ == "__main__":
    main()
