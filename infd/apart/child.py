"""What runs in the worker: take an order, do it, answer, until the daemon is gone.

The kernel ends this process at a task's limit (SIGALRM), when the daemon closes its standard input or ends (SIGIO), and
before any other process where memory runs out. Neither signal has a handler, so nothing depends on what the task does
meanwhile. (PR_SET_PDEATHSIG would end it with the thread that started it. The connection cannot serve for SIGIO: the
kernel may announce an order after it has been read.)
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
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
    _end_with_standard_input()
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
            reply, usable = _done(order, decoder, do)
            wire.send(connection, reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not usable:
                return


def _end_with_standard_input() -> None:
    """Have the kernel end this process at the end of its standard input, on which nothing else ever arrives."""
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it has ended already
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
