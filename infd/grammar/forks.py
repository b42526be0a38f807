"""The process of a worker for constraints: a parent that loads the library, and a forked child that runs the tasks.

A signal ends the child at a task's limit of processor time, or if memory or stack runs out. The parent then replies in
place of the child and forks again, within milliseconds. So no call of a library has to be interrupted.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from infd.apart import wire
from infd.apart.child import serve
from infd.errors import Fault, GrammarFailed
from infd.grammar.workers import Outcome
from infd.offload import WORKER_STACK

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.grammar.protocol import Limits

MEMORY: Final = 2**30  # most bytes of private writable memory of the child (RLIMIT_DATA)
NICE: Final = 10  # niceness of the workers, so that they do not delay the event loop and the device's thread
_PR_SET_PDEATHSIG: Final = 1
_TOO_DEEP: Final = Fault.of(
    GrammarFailed("the rules or references of the constraint nest too deep", code="grammar_too_large")
)


class Task(Protocol):
    @property
    def limits(self) -> Limits: ...


def work(tasks: Any, do: Callable[[Any], Outcome[Any]]) -> None:
    """Run the daemon's tasks, until the daemon closes the connection.

    tasks  msgspec type of the tasks, each a Task
    do     runs a task in the child; may raise
    """
    os.nice(NICE)
    gc.freeze()  # garbage collection in the child would copy the pages of the parent's objects
    busy = mmap(-1, 1)  # shared between parent and child: whether a task has begun and not ended
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        parent = os.getpid()
        busy[0] = False
        if not (fork := os.fork()):
            _end_with(parent)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            _limit_stack()
            serve(tasks, lambda task: _limited(task, do, busy))
            os._exit(0)
        _, status = os.waitpid(fork, 0)
        if not os.WIFSIGNALED(status) or not busy[0]:  # no task waits for a reply
            return
        outcome = _ended_by(os.WTERMSIG(status))
        try:
            wire.send(connection, wire.Reply(msgspec.Raw(msgspec.msgpack.encode(outcome))))
        except wire.Closed:
            return


def _limited(task: Task, do: Callable[[Any], Outcome[Any]], busy: mmap) -> Outcome[Any]:
    busy[0] = True
    signal.setitimer(signal.ITIMER_PROF, task.limits.seconds)
    try:
        return do(task)
    except MemoryError:
        return Outcome()
    except RecursionError:
        return Outcome(fault=_TOO_DEEP)
    except Exception as error:
        return Outcome(fault=Fault.of(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        busy[0] = False


def _ended_by(number: int) -> Outcome[None]:
    """Return the outcome of a task during which a signal ended the child."""
    if number == signal.SIGSEGV:  # the stack is full; if memory runs out, an exception or SIGABRT ends the task
        return Outcome(fault=_TOO_DEEP)
    return Outcome(late=number in (signal.SIGALRM, signal.SIGPROF))


def _limit_stack() -> None:
    """Bound the stack of this process to what the daemon's threads for grammars have in plenty."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (WORKER_STACK if most < 0 else min(WORKER_STACK, most), most))


def _end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
