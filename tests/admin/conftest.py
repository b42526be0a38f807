"""A running engine behind an admin socket."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from infd.admin.commands import AdminContext
from infd.admin.server import AdminServer
from infd.config import Config, LiveConfig
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.request import Generate, Request, SamplingParams
from infd.telemetry.metrics import Metrics
from infd.telemetry.recent import RecentLogs
from tests.admin.settings import fixed
from tests.fakes import FakeExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from infd.engine.streams.stream import Choices


GRAMMARS = {"family": "grammar", "chosen": "fake 1.0", "refused": {"other": "absent"}}


class AdminEngine:
    """Engine and admin server, and a request that stays in flight."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.executor = FakeExecutor()
        self.live = LiveConfig(Config())
        self.engine = Engine(self.live, self.executor, Metrics())
        self.drained = asyncio.Event()
        self.logs = RecentLogs()
        self.admin = self.server()

    def server(self) -> AdminServer:
        """Another server of the same engine; it does not listen yet."""
        context = AdminContext(
            self.engine, "embedded", self.drained.set, fixed(self.live), grammars=lambda: GRAMMARS, logs=self.logs
        )
        return AdminServer(context)

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """Run the engine within the block."""
        await self.engine.load()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.engine.run())
            await asyncio.sleep(0)
            assert self.engine.lifecycle.state is State.READY
            try:
                yield
            finally:
                self.executor.gate.set()
                self.engine.stop()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[tuple[str, Choices]]:
        """Submit a request that stays in flight, because no step completes."""
        self.executor.gate.clear()
        async with self.engine.admit(1, 100) as ticket:
            sampling = SamplingParams(max_tokens=5)
            request = Request(id=ticket.id, prompt=(1, 2, 3), wants=(Generate(sampling),))
            choices = await ticket.submit(request, client="tester")
            yield ticket.id, choices


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[AdminEngine]:
    backend = AdminEngine(tmp_path / "admin.sock")
    await backend.admin.start(backend.socket)
    try:
        yield backend
    finally:
        await backend.admin.close()
        await backend.engine.close()
