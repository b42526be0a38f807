"""Configure the process, run the daemon in an event loop, and exit even if threads are stuck."""

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
from infd.offload import QUICK_SWITCHES
from infd.telemetry import log

if TYPE_CHECKING:
    from infd.config import Config, Environment, Loaded
    from infd.daemon.daemon import Work


def serve(loaded: Loaded, environment: Environment) -> int:
    """Run a daemon in this process until a signal or `infdctl drain` stops it. Return the exit code."""
    code = run(loaded.config, environment, start=loaded)
    exit_if_threads_are_stuck(code)
    return code


def run(config: Config, environment: Environment, work: Work | None = None, start: Loaded | None = None) -> int:
    """Run a daemon as `serve` does, or until `work` ends. Callers then call `exit_if_threads_are_stuck`.

    start  see Daemon
    """
    _open_standard_streams()
    faulthandler.enable()
    _raise_descriptor_limit()
    log.configure(config.log, environment.journal_stream)
    try:
        with QUICK_SWITCHES, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(config, environment, work, start))
    except StartError as error:
        code = error.exit_code
        for line in str(error).splitlines():
            logging.getLogger("infd.daemon").critical(line)
    except Exception:
        code = os.EX_SOFTWARE
        logging.getLogger("infd.daemon").critical("this is a bug in infd, or a lost device", exc_info=True)
    return code


async def _run(config: Config, environment: Environment, work: Work | None, start: Loaded | None) -> int:
    return await Daemon(config, environment, work=work, start=start).run()


def _open_standard_streams() -> None:
    # If the parent closed descriptor 1 or 2, a new socket would get that number, and libraries would print into it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _raise_descriptor_limit() -> None:
    # Every connection uses a descriptor. The soft limit is low for programs that use select(2); the daemon uses epoll.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def exit_if_threads_are_stuck(code: int) -> None:
    """Flush the standard streams, and exit the process if threads remain or the streams cannot be flushed."""
    # At exit the interpreter joins its threads, which would wait forever for a thread stuck in native code.
    current = threading.current_thread()
    stuck = any(thread is not current and not thread.daemon for thread in threading.enumerate())
    # Output that cannot be flushed would turn the exit code into 120.
    if not all([_flushed(sys.stdout), _flushed(sys.stderr)]) or stuck:
        logging.shutdown()
        os._exit(code)


def _flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True
