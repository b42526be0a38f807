"""What runs in the worker: take an order, do it, answer, until the daemon is gone.

The kernel ends this process at a task's limit (SIGALRM), when the daemon's end of the connection closes (SIGIO), and
before any other process where memory runs out. Neither signal has a handler, so nothing depends on what the task does
meanwhile. (PR_SET_PDEATHSIG would end it with the thread that started it.)
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.apart import wire
from infd.errors import InfdError, RequestError, TextFailed

if TYPE_CHECKING:
    from collections.abc import Callable

# Private writable memory, bytes. Not RLIMIT_AS: that counts what threads and libraries only reserve.
MEMORY: Final = 4 * 2**30
_MESSAGE: Final = 500  # characters


def serve(tasks: Any, do: Callable[[Any], Any]) -> None:
    """Do tasks of a msgspec type for the parent process, over the descriptor that the first argument names."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    for limit, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(limit, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    decoder = msgspec.msgpack.Decoder(tasks)
    with suppress(wire.Closed):
        while True:
            order = wire.receive(connection, wire.Order)
            signal.setitimer(signal.ITIMER_REAL, order.seconds)
            _end_with(connection, True)
            reply, usable = _done(order, decoder, do)
            _end_with(connection, False)
            wire.send(connection, reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not usable:
                return


def _end_with(connection: socket.socket, yes: bool) -> None:
    """Let whatever comes over the connection, which during a task is its end only, end this process."""
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if yes else flags & ~os.O_ASYNC)
    with suppress(BlockingIOError):
        if yes and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # it had ended before
            sys.exit()


def _done(
    order: wire.Order, decoder: msgspec.msgpack.Decoder[Any], do: Callable[[Any], Any]
) -> tuple[wire.Reply, bool]:
    """Return what to answer, and whether this process may do more: a library that panicked may be broken."""
    try:
        return wire.Reply(msgspec.Raw(msgspec.msgpack.encode(do(decoder.decode(order.task))))), True
    except TextFailed as error:
        return wire.Reply(failed=True, message=str(error)[:_MESSAGE]), False
    except RequestError as error:
        return wire.Reply(refused=type(error).__name__, message=str(error), param=error.param), True
    except InfdError as error:
        return wire.Reply(refused=type(error).__name__, message=str(error)), True
    except BaseException as error:  # a panic of a library in Rust is no Exception
        message = f"{type(error).__name__}: {error}"
        return wire.Reply(failed=True, message=message[:_MESSAGE]), False
