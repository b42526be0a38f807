"""Acquire what requests need before they are queued, so that the scheduler waits for nothing slow."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from infd.adapters.registry import Adapters
    from infd.request import Adapter


class Need(Protocol):
    """Something to acquire before a request is queued."""

    async def acquire(self) -> None:
        """Wait for the need, and hold it. If this raises or is cancelled, nothing is held."""

    def release(self) -> None:
        """Undo one `acquire`. Never raises."""


@asynccontextmanager
async def prepare(needs: Iterable[Need]) -> AsyncIterator[None]:
    """Acquire the needs in order; release them in reverse when the block ends, or when an `acquire` fails.

    Sequences queued within the block acquire their adapter again, and hold it until their terminal event.
    """
    held: list[Need] = []
    try:
        for need in needs:
            await need.acquire()
            held.append(need)
        yield
    finally:
        for need in reversed(held):
            need.release()


class AdapterNeed:
    """The weights of the adapter `name` in host memory; with name None (the model itself) nothing is acquired.

    adapter  the adapter named `name`, once acquired
    """

    def __init__(self, registry: Adapters, name: str | None) -> None:
        self.adapter: Adapter | None = None
        self._registry = registry
        self._name = name

    async def acquire(self) -> None:
        """Raises ModelNotFound, AdapterUnavailable."""
        if self._name is not None:
            self.adapter = await self._registry.acquire(self._name)

    def release(self) -> None:
        if self.adapter is not None:
            self._registry.release(self.adapter)
