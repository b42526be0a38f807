"""Hold or refuse new requests while the engine is not ready."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from infd.engine.lifecycle.state import State
from infd.errors import NotReady

if TYPE_CHECKING:
    from infd.config import LiveConfig
    from infd.engine.lifecycle.state import Lifecycle


class Gate:
    """Open while the engine is READY.

    holds  whether new requests wait while the gate is closed; otherwise they are refused
    """

    def __init__(self, lifecycle: Lifecycle, live: LiveConfig) -> None:
        self.holds = False
        self._live = live
        self._lifecycle = lifecycle
        self._waiters: dict[object, asyncio.Future[None]] = {}  # in order of arrival

    @property
    def open(self) -> bool:
        return self._lifecycle.state is State.READY

    @property
    def waiting(self) -> int:
        """Requests that wait for the gate to open."""
        return len(self._waiters)

    def passes(self, *, admitted: bool) -> bool:
        """Return whether a request need not wait. While draining, only rounds of requests admitted earlier pass."""
        return self.open or (admitted and self._lifecycle.state is State.DRAINING)

    def require(self, *, admitted: bool = False) -> None:
        """Raise NotReady if a request would be refused.

        admitted  whether the request is a round of a request admitted earlier
        """
        if not (self.holds or self.passes(admitted=admitted)):
            raise self.not_ready()

    async def enter(self, *, admitted: bool = False) -> None:
        """Return once the request passes. Raises NotReady."""
        request, hold_s = object(), self._live.now.server.hold_timeout_s
        try:
            async with asyncio.timeout(hold_s):
                while not self.passes(admitted=admitted):
                    self.require(admitted=admitted)
                    self._waiters[request] = asyncio.get_running_loop().create_future()
                    await self._waiters[request]
        except TimeoutError:
            raise self.not_ready(f"the request waited {hold_s:g} s for it (server.hold_timeout_s)") from None
        finally:
            self._waiters.pop(request, None)

    def recheck(self) -> None:
        """Wake all waiting requests, in order of arrival. Each then enters, is refused, or waits again."""
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(None)

    def refuse_all(self, reason: str) -> None:
        """Refuse all waiting requests."""
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(self.not_ready(reason))

    def not_ready(self, reason: str = "") -> NotReady:
        """Return the error for a request refused in the current state."""
        return NotReady(self._lifecycle.state.value, reason or self._lifecycle.reason)
