"""What surrounds the event loop: the process's own settings before it, a certain exit after it."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import resource
import sys
import threading
from typing import TYPE_CHECKING, TextIO

import uvloop

from infd.daemon.daemon import Daemon
from infd.errors import StartError
from infd.telemetry import log

if TYPE_CHECKING:
    from infd.config import Config, Environment

# At Python's 5 ms a busy loop starves the device thread's many short calls.
SWITCH_INTERVAL_S = 0.0005


def serve(config: Config, environment: Environment) -> int:
    """Run a daemon in this process until it is told to stop. Return the exit code. Raises StartError."""
    _open_standard_streams()
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _take_all_descriptors()
    log.configure(config.log, environment.journal_stream)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(config, environment))
    except StartError as error:
        code = error.exit_code
        for line in str(error).splitlines():
            logging.getLogger("infd.daemon").critical(line)
    except Exception:
        code = os.EX_SOFTWARE
        logging.getLogger("infd.daemon").critical("this is a bug in infd, or a lost device", exc_info=True)
    _leave_at_once_if_the_interpreter_cannot(code)
    return code


async def _run(config: Config, environment: Environment) -> int:
    return await Daemon(config, environment).run()


def _open_standard_streams() -> None:
    # Who starts us may have closed them. Then a socket of ours would get their numbers, and what others print.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _take_all_descriptors() -> None:
    # The soft limit is low for the sake of select(2), which nothing here calls; every connection needs one.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave_at_once_if_the_interpreter_cannot(code: int) -> None:
    # It would wait for threads, and one that is stuck in native code never ends.
    this = threading.current_thread()
    stuck = any(thread is not this and not thread.daemon for thread in threading.enumerate())
    # What others printed and nobody takes would turn its exit code into 120.
    if not all([_flushed(sys.stdout), _flushed(sys.stderr)]) or stuck:
        logging.shutdown()
        os._exit(code)


def _flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True
