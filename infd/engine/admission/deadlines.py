"""Limit the time until a request's first step, and until its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from infd.errors import QueueTimeout, RequestTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import ServerConfig
    from infd.errors import RequestError


class Deadlines:
    """The two timers of one ticket: `server.queue_timeout_s` and `server.request_timeout_s`."""

    __slots__ = ("_life", "_wait")

    def __init__(self, server: ServerConfig, expire: Callable[[RequestError], None]) -> None:
        """expire: called at a timeout with the error that ends the request."""
        loop = asyncio.get_running_loop()
        self._wait: asyncio.TimerHandle | None = None
        self._life: asyncio.TimerHandle | None = None
        if (wait_s := server.queue_timeout_s) is not None:
            self._wait = loop.call_later(wait_s, expire, QueueTimeout(wait_s))
        if (life_s := server.request_timeout_s) is not None:
            self._life = loop.call_later(life_s, expire, RequestTimeout(life_s))

    def started(self) -> None:
        """Stop the queue timer. Called when the first step is planned."""
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def cancel(self) -> None:
        """Stop both timers. Called when the request has ended."""
        self.started()
        if self._life is not None:
            self._life.cancel()
            self._life = None
