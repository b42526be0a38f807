"""Executors over the fake model whose steps fail at chosen tokens: in this process, and over a socket."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from infd.errors import CheckpointError, DeviceLost
from infd.executors.local import LocalExecutor
from infd.executors.remote import RemoteExecutor
from infd.executors.worker import serve
from tests.runner.driving import load
from tests.runner.fake_model import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import Config
    from infd.executors.wire import Start
    from infd.models.base import Batch
    from infd.runner.pulse import Pulse
    from infd.runner.start.assembly import Loaded

UNSOUND, FULL, LOST = 100, 99, 98
BROKEN = "/broken"  # a path of a model that cannot be loaded


def fault(batch: Batch) -> None:
    """Raise, or end the process, where a token asks for it."""
    tokens = batch.tokens.tolist()
    if UNSOUND in tokens:
        raise KeyError("the kernel said no")
    if FULL in tokens:
        raise MemoryError("no room")
    if LOST in tokens:
        raise DeviceLost("an uncorrectable error")


def faulty(config: Config, progress: Callable[[int, int], None] = lambda done, total: None) -> LocalExecutor:
    def build(config: Config, pulse: Pulse) -> Loaded:
        if config.model.path == BROKEN:
            raise CheckpointError(f"{BROKEN}: no model")
        progress(3, 4)
        return load(FakeModel(fault=fault), config, pulse)

    return LocalExecutor(config, build)


def started(start: Start, progress: Callable[[int, int], None]) -> LocalExecutor:
    return faulty(start.config, progress)


class Beside:
    """The other side of a RemoteExecutor, on the same event loop."""

    def __init__(self, theirs: socket.socket) -> None:
        self._task = asyncio.ensure_future(serve(socket.socket(fileno=theirs.detach()), started))

    async def wait(self) -> int:
        return await self._task

    def kill(self) -> None:
        self._task.cancel()


async def beside(theirs: socket.socket) -> Beside:
    return Beside(theirs)


def remote(config: Config, progress: Callable[[int, int], None] = lambda done, total: None) -> RemoteExecutor:
    return RemoteExecutor(lambda: config, progress, spawn=beside)
