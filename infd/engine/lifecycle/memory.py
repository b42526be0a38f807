"""Release and restore the model's memory, and replace its weights, while no step runs.

Kernels would read zeros from released memory without an error, so steps are held before memory is released and start
again only when all parts are restored.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from infd.engine.lifecycle.state import State
from infd.errors import WrongState
from infd.memory import MemoryPart, Residency

if TYPE_CHECKING:
    from infd.adapters.registry import Adapters
    from infd.engine.core import EngineCore
    from infd.engine.executor import Executor
    from infd.engine.lifecycle.state import Lifecycle


class ModelMemory:
    """The executor's memory. Only one change runs at a time."""

    def __init__(self, executor: Executor, core: EngineCore, adapters: Adapters, lifecycle: Lifecycle) -> None:
        self._executor = executor
        self._core = core
        self._adapters = adapters
        self._lifecycle = lifecycle
        self._changing = asyncio.Lock()
        self.weights_generation = 0  # number of attempts to load other weights since the start

    @property
    def changing(self) -> bool:
        return self._changing.locked()

    @property
    def sleep_refusal(self) -> str:
        """Reason why memory cannot be released; empty if `release` is possible."""
        return self._executor.sleep_refusal

    @property
    def released(self) -> frozenset[MemoryPart]:
        return self._executor.memory.released

    @property
    def invalid(self) -> bool:
        """Whether a load of weights failed midway, so that no step may run."""
        return self._executor.memory.weights is Residency.INVALID

    def released_by(self, level: int) -> frozenset[MemoryPart]:
        """Return the parts of memory that a sleep of this level releases."""
        return self._executor.released_by(level)

    async def release(self, level: int) -> int:
        """Release the parts of `released_by(level)`; return the bytes freed."""
        if level > 1:
            self._adapters.store()  # like the weights, adapters are read from their files again when needed
        async with self._changing:
            try:
                return await self._executor.sleep(level)
            finally:
                # Without the cache's memory no prefix is valid, even if this sleep failed.
                if MemoryPart.CACHE in self.released:
                    self._core.forget_prefixes(preempting=True)

    async def restore(self, parts: frozenset[MemoryPart]) -> None:
        """Restore the released parts among `parts`. Raises StartError."""
        async with self._changing:
            missing = parts & self.released
            if missing:
                self._lifecycle.enter(State.SLEEPING, "waking")
                await self._executor.wake(missing)

    async def load_weights(self, path: str, root: str) -> None:
        """Load the weights of another checkpoint, see `Executor.load_weights`.

        Raises StartError, and WrongState unless steps are held.
        """
        async with self._changing:
            self._require_held_steps()
            self.weights_generation += 1  # counted first: a failed load may change weights too
            await self._executor.load_weights(path, root)
            # Frozen sequences keep pages computed by the old weights; no other sequence may share these pages.
            self._core.forget_prefixes(preempting=False)

    def _require_held_steps(self) -> None:
        lifecycle, loop = self._lifecycle, self._core.loop
        if lifecycle.state is State.READY or not loop.held or loop.in_flight:
            raise WrongState(lifecycle.state.value, lifecycle.reason, "wait for `infdctl pause --wait` first")
