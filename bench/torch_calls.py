"""`infd` with a null device whose thread issues hundreds of tiny torch calls per step.

Each call briefly takes and releases the interpreter lock, the worst case for an event loop: a CPU model behaves so
unless its steps are few long calls.

    python bench/torch_calls.py start --device null ...
"""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from infd.cli import main
from infd.daemon import components
from infd.executors.null import NullExecutor, NullStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from infd.config import Config
    from infd.errors import DeviceLost
    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan, StepResult

CALLS = 400


class TorchStep:
    def __init__(self, executor: TorchCalls, null: NullStep) -> None:
        self._executor = executor
        self._null = null

    def sample(self, mask: Any | None = None) -> asyncio.Future[StepResult]:
        self._executor.issue(self._null)
        return self._null.result


class TorchCalls(NullExecutor):
    """The null executor, with CALLS torch calls on a thread before each step's result."""

    def __init__(self, config: Config, sizes: Callable[[], components.NullSizes], beside: Callable[[], Path]) -> None:
        super().__init__(config, sizes, beside)
        self._queue: SimpleQueue[NullStep | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def load(self, lost: Callable[[DeviceLost], None] | None = None) -> Capacity:
        self._thread = threading.Thread(target=self._work, args=(asyncio.get_running_loop(),), name="torch-calls")
        self._thread.start()
        return await super().load(lost)

    def forward(self, plan: StepPlan) -> TorchStep:  # type: ignore[override]  # the engine uses only sample()
        return TorchStep(self, super().forward(plan))

    def issue(self, step: NullStep) -> None:
        self._queue.put(step)

    async def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        import torch  # on this thread, as in the real executor

        x = torch.zeros(16)
        while (step := self._queue.get()) is not None:
            for _ in range(CALLS):
                x.add_(1.0)
            loop.call_soon_threadsafe(step.sample)


def _executor(
    config: Config, environment: Mapping[str, str], directory: Future[Path], progress: Callable[[int, int], None]
) -> TorchCalls:
    return TorchCalls(
        config, lambda: components.NullSizes.read(directory.result()), lambda: directory.result().absolute().parent
    )


if __name__ == "__main__":
    components.executor = _executor  # the unchanged daemon uses this executor
    main()
