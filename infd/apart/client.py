"""The daemon's side of a worker: one process, started with the first task and killed at a task's limit."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from infd.apart import wire
from infd.errors import CheckpointError, InvalidRequest, TextFailed, TooCostly
from infd.frames import FrameTooLarge

if TYPE_CHECKING:
    from msgspec import Struct

R = TypeVar("R")

# The daemon kills the process this long after a task's limit. Usually the kernel has killed the process at the limit,
# but the kernel cannot while the process starts or is stopped by a signal.
PATIENCE_S: Final = 60.0


class Worker:
    """A worker process that runs one task at a time. `ask` blocks, so the event loop's thread must not call `ask`.

    reasons  component (tokenizer, chat template) -> reason why it runs in the process, for operators
    """

    def __init__(self, module: str, inherited: tuple[int, ...] = ()) -> None:
        """Prepare the worker, without a process.

        module     the program of the process, which calls `child.serve`
        inherited  file descriptors that the process inherits; their numbers follow the socket's in its arguments
        """
        self._module = module
        self._inherited = inherited
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._repeated: dict[type[Struct], wire.TaskMessage] = {}
        self._interrupted = False  # whether the process was killed; it may not have exited yet
        self._closed = False
        self.reasons: dict[str, str] = {}

    def start(self) -> None:
        """Start the process before the first task, unless it runs. Takes milliseconds. Raises TextFailed if closed."""
        with self._lock:
            if self._process is None:
                self._start()

    def ask(self, task: Struct, reply: type[R], *, seconds: float) -> R:
        """Run a task, for at most `seconds`, and return the result.

        Raises InvalidRequest or CheckpointError if the task raises that error, TooCostly after `seconds`, TextFailed
        if the task raises another error or the process ends.
        """
        message = wire.TaskMessage(msgspec.Raw(msgspec.msgpack.encode(task)), seconds)
        with self._lock:
            if self._interrupted:
                self._end()
            if self._process is None:
                self._start()
            return msgspec.msgpack.decode(self._run(message), type=reply)

    def keep(self, task: Struct, reply: type[R], *, seconds: float) -> R:
        """Run a task on which later tasks depend, now and in each new process. Replaces the kept task of its type."""
        result = self.ask(task, reply, seconds=seconds)
        with self._lock:
            self._repeated[type(task)] = wire.TaskMessage(msgspec.Raw(msgspec.msgpack.encode(task)), seconds)
        return result

    @property
    def pid(self) -> int | None:
        """The id of the running process, None if no process runs."""
        process = self._process
        return None if process is None else process.pid

    def interrupt(self) -> None:
        """Kill the process, so that the running task raises TextFailed. Thread-safe."""
        process = self._process
        if process is not None:
            self._interrupted = True
            process.kill()

    def close(self) -> None:
        """Kill the process. The running task and later tasks raise TextFailed."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._closed:
            raise TextFailed("the worker is closed")
        parent_end, child_end = socket.socketpair()
        with child_end:
            descriptors = (child_end.fileno(), *self._inherited)
            command = [sys.executable, "-m", self._module, *map(str, descriptors)]
            self._connection = parent_end
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # the daemon closes the pipe to end the process
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,  # a terminal's SIGINT goes to the daemon only
            )
        for message in self._repeated.values():
            self._run(message)

    def _run(self, message: wire.TaskMessage) -> msgspec.Raw:
        connection = self._connection
        assert connection is not None
        deadline = time.monotonic() + message.seconds + PATIENCE_S
        try:
            wire.send(connection, message, deadline)
            reply = wire.receive(connection, wire.Reply, deadline)
        except wire.Late:
            self._end()
            raise TooCostly(f"took more than {message.seconds:g} s") from None
        except (wire.Closed, FrameTooLarge, msgspec.MsgspecError):
            code = self._end()
            if code in (-signal.SIGALRM, -signal.SIGPROF):  # timers of wall-clock time and of processor time
                raise TooCostly(f"took more than {message.seconds:g} s") from None
            raise TextFailed(f"a checkpoint's text ended its worker ({_named(code)})") from None
        except BaseException:  # end the process: otherwise the next task would receive this task's reply
            self._end()
            raise
        if reply.fault is not None:
            error = reply.fault.error()
            if isinstance(error, InvalidRequest | CheckpointError):
                raise error
            self._end()
            raise TextFailed(f"a checkpoint's text failed in its worker: {reply.fault.message}")
        return reply.result

    def _end(self) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._interrupted = False
        if connection is not None:
            connection.close()
        if process is None:
            return None
        code = process.poll()
        if code is None:
            try:
                code = process.wait(0.1)  # wait: if the process is ending by itself, its exit code shows the cause
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return code


def _named(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
