"""Acquire a request's adapter and grammars before the request is queued, so that the scheduler does not wait."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from infd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from infd.adapters.registry import Adapters
    from infd.constraint import Restriction
    from infd.grammar.protocol import Grammar, Grammars
    from infd.request import Adapter


class Need(Protocol):
    """A resource to acquire before a request is queued."""

    async def acquire(self) -> None:
        """Wait for the resource, and acquire it. If the call raises or is cancelled, nothing is acquired."""

    def release(self) -> None:
        """Release the resource acquired by one `acquire`. Never raises."""


@asynccontextmanager
async def prepare(needs: Iterable[Need]) -> AsyncIterator[None]:
    """Acquire the needs in order. When the block ends or an `acquire` fails, release the acquired needs in reverse.

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


class GrammarNeed:
    """The compiled grammar of a constraint.

    constraint  the constraint to compile; hashable
    grammar     the compiled grammar; None until acquired
    """

    def __init__(self, grammars: Grammars | None, constraint: Restriction) -> None:
        self.constraint = constraint
        self.grammar: Grammar | None = None
        self._grammars = grammars

    async def acquire(self) -> None:
        """Compile the grammar. Raises GrammarFailed, Unsupported."""
        if self._grammars is None:
            raise Unsupported("structured output")
        self.grammar = await self._grammars.compile(self.constraint)

    def release(self) -> None:
        """No-op: requests share grammars, and only the cache of grammars evicts a grammar."""


class AdapterNeed:
    """The weights of the adapter `name` in host memory. If `name` is None (the model itself), nothing is acquired.

    adapter  the adapter named `name`; None until acquired
    """

    def __init__(self, registry: Adapters, name: str | None) -> None:
        self.adapter: Adapter | None = None
        self._registry = registry
        self._name = name

    async def acquire(self) -> None:
        """Acquire the adapter `name`. Raises ModelNotFound, AdapterUnavailable."""
        if self._name is not None:
            self.adapter = await self._registry.acquire(self._name)

    def release(self) -> None:
        if self.adapter is not None:
            self._registry.release(self.adapter)
