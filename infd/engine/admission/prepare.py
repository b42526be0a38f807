"""Get ready what requests need before they are queued, so that nothing slow is left to the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Many
    from types import TracebackType

    from infd.adapters.registry import Adapters
    from infd.request import Adapter, Request


class Prepared:
    """What a ticket's requests need, held while the block is open. Whoever queues them holds on to it for longer.

    adapter  the one that they all ask for: whoever held one and waited for another could wait for ever
    """

    def __init__(self, adapters: Adapters, requests: Many[Request]) -> None:
        names = {request.adapter for request in requests} or {None}
        assert len(names) == 1, "the requests of one ticket ask for one adapter"
        self.adapter: Adapter | None = None
        self._registry = adapters
        self._name = names.pop()

    async def __aenter__(self) -> Prepared:
        """Raises ModelNotFound, AdapterUnavailable."""
        if self._name is not None:
            self.adapter = await self._registry.acquire(self._name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.adapter is not None:
            self._registry.release(self.adapter)
