"""Get ready what requests need before they are queued, so that nothing slow is left to the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Many
    from types import TracebackType

    from infd.adapters.registry import Adapters
    from infd.request import Adapter, Request


class Prepared:
    """What some requests need, held while the block is open. Whoever queues them holds on to it for longer.

    adapters  by request
    """

    def __init__(self, adapters: Adapters, requests: Many[Request]) -> None:
        self.adapters: list[Adapter | None] = []
        self._registry = adapters
        self._requests = requests

    async def __aenter__(self) -> Prepared:
        """Raises ModelNotFound, AdapterUnavailable."""
        try:
            for request in self._requests:
                name = request.adapter
                self.adapters.append(None if name is None else await self._registry.acquire(name))
        except BaseException:
            self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        for adapter in self.adapters:
            if adapter is not None:
                self._registry.release(adapter)
        self.adapters.clear()
