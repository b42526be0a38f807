"""Run work on threads if it would block the event loop.

Short work (a page of text, one small file) stays on the event loop, because work on
a thread costs about 50 us more and contends for the interpreter lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

P = ParamSpec("P")
R = TypeVar("R")


# Longest time for which each of the device thread's many short calls waits for the GIL while the event loop is busy.
# Python's default is 5 ms.
SWITCH_INTERVAL_S: Final = 0.0005

GRAMMAR_THREADS: Final = 4

# Libraries of grammars recurse as deep as a grammar nests, and a stack that overflows ends the process. So all grammars
# but small ones are compiled in a worker with a stack of WORKER_STACK first (`grammar/forks.py`, `grammar/writing.py`).
WORKER_STACK: Final = 8 * 2**20
_GRAMMAR_STACK: Final = 4 * WORKER_STACK


class QuickSwitches:
    """A context in which a thread gives up the GIL after SWITCH_INTERVAL_S if another waits. Entered by any threads.

    The interval is the process's, and a caller of `infd.LLM` may need its own: the first to enter shortens it, the last
    to leave restores it, unless other code has set it since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = self._ours = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                _set_switch_interval(min(self._before, SWITCH_INTERVAL_S))
                self._ours = sys.getswitchinterval()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and sys.getswitchinterval() == self._ours:
                _set_switch_interval(self._before)


def _set_switch_interval(seconds: float) -> None:
    sys.setswitchinterval(seconds + 5e-7)  # Python truncates to microseconds


QUICK_SWITCHES: Final = QuickSwitches()  # one for the process, as the interval is


class _Call:
    """A call to the worker process, and whether its caller still waits for the result."""

    __slots__ = ("awaited", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.awaited = True


class Offload:
    """Thread pools for work that would block the event loop.

    `__call__`  long tokenizations and files, on `threads` threads
    `short`     tasks of at most about 50 ms, on one thread, so that ordinary texts never wait behind seconds of work
    `grammars`  compilation of grammars, on GRAMMAR_THREADS threads; the caller chooses a thread, so that cheap
                grammars do not wait for costly grammars
    `masks`     token masks of steps with grammars, on one thread, so that no other work delays a step
    `storage`   transactions of the store of responses, on one thread, in order
    `apart`     calls to the worker process (`apart/`), on one thread, because the worker runs one task at a time
    """

    def __init__(self, threads: int = 2, *, interrupt: Callable[[], None] = lambda: None) -> None:
        """interrupt: ends the task that the worker runs. Called on the event loop's thread."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="infd-offload")
        self._short = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-short")
        self._grammars = [_GrammarThread(f"infd-offload-grammars-{thread}") for thread in range(GRAMMAR_THREADS)]
        self._masks = _GrammarThread("infd-offload-masks")
        self._storage = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-storage")
        self._apart = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-apart")
        self._interrupt = interrupt
        self._awaited = 0  # number of calls of `apart` that have not returned
        self._lock = threading.Lock()  # guards _running
        self._running: _Call | None = None

    async def __call__(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` on a thread and return its result. Cancelling the caller does not stop the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def short(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work`, known to take about 50 ms at most, on the thread for short work."""
        return await asyncio.get_running_loop().run_in_executor(self._short, partial(work, *args, **kwargs))

    def grammars(self, thread: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Run `work` on grammar thread number `thread`, after that thread's queued work."""
        return asyncio.get_running_loop().run_in_executor(self._grammars[thread], partial(work, *args, **kwargs))

    def masks(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Run `work` on the thread for masks, after that thread's queued work."""
        return asyncio.get_running_loop().run_in_executor(self._masks, partial(work, *args, **kwargs))

    async def storage(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` on the store's thread, after that thread's queued work."""
        return await asyncio.get_running_loop().run_in_executor(self._storage, partial(work, *args, **kwargs))

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work`, a call to the worker process, on the thread for the worker.

        If the caller is cancelled, a queued call is dropped; a running call is interrupted once another call waits.
        """
        call = _Call(partial(work, *args, **kwargs))
        self._awaited += 1
        self._interrupt_abandoned()
        try:
            result: R = await asyncio.get_running_loop().run_in_executor(self._apart, self._run, call)
            return result
        finally:
            call.awaited = False
            self._awaited -= 1
            self._interrupt_abandoned()

    def close(self) -> None:
        """Cancel queued work; do not wait for running work."""
        for pool in (self._pool, self._short, *self._grammars, self._masks, self._storage, self._apart):
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, call: _Call) -> Any:
        """Run a call. Called on the thread for the worker."""
        with self._lock:
            self._running = call
        try:
            return call.work()
        finally:
            with self._lock:
                self._running = None

    def _interrupt_abandoned(self) -> None:
        """Interrupt the running call if its caller was cancelled and another call waits."""
        with self._lock:
            if self._running is not None and not self._running.awaited and self._awaited:
                self._interrupt()


class _GrammarThread(ThreadPoolExecutor):
    """One thread with a stack of _GRAMMAR_STACK. The interpreter's setting applies to threads that start meanwhile."""

    def __init__(self, name: str) -> None:
        super().__init__(1, thread_name_prefix=name)
        self._started = False

    def submit(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        if self._started:
            return super().submit(work, *args, **kwargs)
        self._started = True
        default = threading.stack_size(_GRAMMAR_STACK)
        try:
            return super().submit(work, *args, **kwargs)
        finally:
            threading.stack_size(default)
