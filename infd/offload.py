"""The only door for blocking work off the event loop.

Short work (a page of text, one small file) stays on the loop: a thread costs
about 50 us and the interpreter lock besides.
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
    """A few threads for work that would hold up the loop: long tokenizations, files.

    One more takes only what is short (some 50 ms), so that texts of ordinary length never wait behind seconds of work;
    and one waits for the worker (`apart/`), which does one thing at a time, so that nobody else's work waits behind it.
    """

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="infd-offload")
        self._short = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-short")
        self._apart = ThreadPoolExecutor(1, thread_name_prefix="infd-offload-apart")

    async def __call__(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `work` on a thread. Cancelling the caller leaves the thread to finish on its own."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def short(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the same with work that is known to be short."""
        return await asyncio.get_running_loop().run_in_executor(self._short, partial(work, *args, **kwargs))

    async def apart(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the same with work that waits for the worker. Cancelling the caller before its turn saves the work."""
        return await asyncio.get_running_loop().run_in_executor(self._apart, partial(work, *args, **kwargs))

    def close(self) -> None:
        for pool in (self._pool, self._short, self._apart):
            pool.shutdown(wait=False, cancel_futures=True)
