"""Write constraints as grammars, and compile costly grammars on trial, in processes that can be killed.

Rewriting a schema takes up to a second of Python, in which the event loop's thread would wait for the GIL. On a busy
machine the wait is many times longer, because the thread that holds the GIL may not be scheduled. Compilation by
llguidance cannot be interrupted, and fuel does not bound all of its time: for `allOf` of n patterns llguidance takes
time exponential in n to write the message of the refusal.

A worker consists of two processes. The parent loads the library and forks the child; the child writes one constraint
after another. The kernel ends the child at the limit of time, and if memory or stack runs out. The parent then replies
in place of the child and forks again, within milliseconds.

A worker starts in 0.15 s and takes 17 MiB. No worker starts before the first constraint, because most daemons never
serve constraints. After the first constraint a spare worker is kept, so that no constraint waits for the start of a
worker while costly constraints keep the other workers busy.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from mmap import mmap
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from infd.apart import wire
from infd.apart.child import serve
from infd.apart.client import Worker
from infd.errors import Fault, GrammarFailed, GrammarInterrupted, ServerStopped, TextFailed, TooSlow
from infd.grammar.locating import locate
from infd.grammar.protocol import Limits  # noqa: TC001 (msgspec reads annotations)
from infd.grammar.refusal import refused
from infd.grammar.writing import Written, encoded, listed, write
from infd.request import Constraint  # noqa: TC001 (msgspec reads annotations)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.grammar.binding import Handle, Library

MODULE: Final = "infd.grammar.trial"
MEMORY: Final = 2**30  # most bytes of private writable memory of the child (RLIMIT_DATA)
_PR_SET_PDEATHSIG: Final = 1
WORKERS: Final = 4  # with this many workers no spare is added: four threads compile constraints
NICE: Final = 10  # niceness of the workers: the event loop and the device come first
CLOCK_S: Final = 30.0  # most wall-clock time of a task: on a busy machine a worker may not run for seconds


class Write(Struct, frozen=True, tag="write"):
    """Write a constraint; compile its costly parts within `fuel`, only to see whether the compilation ends.

    marks  mark -> id of the token that spells the mark
    """

    constraint: Constraint
    limits: Limits
    marks: dict[str, int]
    fuel: dict[str, int]


class Locate(Struct, frozen=True, tag="locate"):
    """Find the part of a constraint's schema that llguidance refuses within `fuel`; `Outcome.fault` is its error."""

    constraint: Constraint
    limits: Limits
    fuel: dict[str, int]


class Outcome(Struct, frozen=True):
    """The result of a task: `written`, or an error, or neither, for example if memory ran out.

    late  whether the kernel ended the child at the task's limit of time
    """

    written: Written | None = None
    fault: Fault | None = None
    late: bool = False


class Trial:
    """Sends tasks to the workers. Calls block, so the event loop's thread must not make them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._workers: list[Worker] = []
        self._closed = False

    def __call__(self, constraint: Constraint, limits: Limits, marks: dict[str, int], fuel: dict[str, int]) -> Written:
        """Write a constraint.

        Raises TooSlow after `limits.seconds`, another GrammarFailed for a refused constraint, and GrammarInterrupted.
        """
        outcome = self._outcome(Write(constraint, limits, marks, fuel))
        if outcome.written is not None:
            return outcome.written
        if outcome.late:
            raise _too_slow(limits)
        if outcome.fault is None:
            raise GrammarFailed("compiling the constraint takes too much memory", code="grammar_too_large")
        failure = outcome.fault.error()
        if isinstance(failure, GrammarFailed):
            raise failure
        raise TextFailed(f"a constraint failed in its worker: {outcome.fault.message}")

    def locate(self, constraint: Constraint, limits: Limits, fuel: dict[str, int]) -> GrammarFailed | None:
        """Return the error, with its path, of the first schema that llguidance refuses alone; None if none is found.

        Raises TooSlow after `limits.seconds`, and GrammarInterrupted.
        """
        outcome = self._outcome(Locate(constraint, limits, fuel))
        if outcome.late:
            raise _too_slow(limits)
        failure = None if outcome.fault is None else outcome.fault.error()
        return failure if isinstance(failure, GrammarFailed) else None

    def _outcome(self, task: Write | Locate) -> Outcome:
        try:
            with self.worker() as worker:
                return worker.ask(task, Outcome, seconds=CLOCK_S)
        except TextFailed as error:
            if self._closed:
                raise ServerStopped from error
            raise GrammarInterrupted from error
        except UnicodeEncodeError as error:
            raise GrammarFailed("the constraint is not valid Unicode", code="invalid_grammar") from error

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers, in the order in which the workers were added."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def close(self) -> None:
        """Stop the workers. Running tasks and later tasks raise ServerStopped."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.close()

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Acquire the worker that became idle last, or a new worker if none is idle. Leaving the block releases it."""
        with self._lock:
            if self._closed:
                raise ServerStopped
            worker = self._idle.pop() if self._idle else self._added()
        try:
            yield worker
        finally:
            self._return(worker)

    def _return(self, worker: Worker) -> None:
        with self._lock:
            if not self._closed and not self._idle and len(self._workers) < WORKERS:
                spare = self._added()
                with suppress(OSError):  # the spare's first task starts the process again, or reports the error
                    spare.start()
                self._idle.append(spare)
            self._idle.append(worker)

    def _added(self) -> Worker:
        worker = Worker(MODULE)
        self._workers.append(worker)
        return worker


def _too_slow(limits: Limits) -> TooSlow:
    message = f"compiling the constraint took more than {limits.seconds:g} s"
    return TooSlow(message, code="grammar_too_large")


class _Tasks:
    """Runs tasks in the child. Made in the parent, before the fork.

    busy  one byte, shared between parent and child: whether a task has begun and not ended
    """

    def __init__(self) -> None:
        from infd.grammar.binding import Library

        self.busy = mmap(-1, 1)
        self._library: Library = Library()
        self._vocabulary: Handle = self._library.vocabulary([bytes([byte]) for byte in range(255)], [])
        gc.freeze()  # garbage collection in the child would copy the pages of these objects

    def do(self, task: Write | Locate) -> Outcome:
        self.busy[0] = True
        signal.setitimer(signal.ITIMER_PROF, task.limits.seconds)
        try:
            match task:
                case Locate(constraint, limits, fuel):
                    error = locate(constraint, limits, lambda grammar: self._compile(grammar, fuel))
                    return Outcome(fault=None if error is None else Fault.of(error))
                case Write(constraint, limits, marks, fuel):
                    draft = write(constraint, limits, marks)
                    for grammar in draft.costly:
                        self._library.matcher(self._vocabulary, listed([encoded(grammar)]), fuel)
                    return Outcome(draft.written())
        except MemoryError:
            return Outcome()
        except Exception as error:
            return Outcome(fault=Fault.of(error))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.busy[0] = False

    def _compile(self, grammar: bytes, fuel: dict[str, int]) -> None:
        """Raise GrammarFailed for a grammar that llguidance refuses."""
        from infd.grammar.binding import error_of

        matcher = self._library.matcher(self._vocabulary, listed([grammar]), fuel)
        if (message := error_of(self._library.functions, matcher)) is not None:
            raise refused(message)


def _work() -> None:
    """Fork a child for tasks, and again whenever the kernel ends the child, until the daemon closes the connection."""
    os.nice(NICE)
    tasks = _Tasks()
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        parent = os.getpid()
        tasks.busy[0] = False
        if not (fork := os.fork()):
            _end_with(parent)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            serve(Write | Locate, tasks.do)
            os._exit(0)
        _, status = os.waitpid(fork, 0)
        if not os.WIFSIGNALED(status) or not tasks.busy[0]:  # no task waits for a reply
            return
        outcome = Outcome(late=os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF))
        try:
            wire.send(connection, wire.Reply(msgspec.Raw(msgspec.msgpack.encode(outcome))))
        except wire.Closed:
            return


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    _work()
