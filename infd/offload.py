"""Run blocking work on threads; only this module and the executors start threads.

Short work (a page of text, one small file) stays on the event loop: a thread
costs about 50 us and contends for the interpreter lock.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class Offload:
    """Three thread pools for work that would block the event loop.

    `__call__`  long tokenizations and files, on `threads` threads
    `short`     tasks of about 50 ms, on one thread, so that ordinary texts never wait behind seconds of work
    `apart`     calls to the worker process (`apart/`), on one thread, because the worker runs one task at a time
    """

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="infd-offload")
        self._short = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-short")
        self._apart = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-apart")

    async def __call__(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` on a thread and return its result. Cancelling the caller does not stop the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def short(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work`, known to take about 50 ms at most, on the thread for short work."""
        return await asyncio.get_running_loop().run_in_executor(self._short, partial(work, *args, **kwargs))

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work`, a call to the worker process, on its thread. Cancelling a queued caller drops the work."""
        return await asyncio.get_running_loop().run_in_executor(self._apart, partial(work, *args, **kwargs))

    def close(self) -> None:
        """Cancel queued work; do not wait for running work."""
        for pool in (self._pool, self._short, self._apart):
            pool.shutdown(wait=False, cancel_futures=True)
