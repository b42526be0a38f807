"""A whole endpoint for tests: real engine, real socket, a fake device with predictable answers."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

import aiohttp

from infd.config import Config, LiveConfig
from infd.drafting.select import drafting
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.http.app import HttpServer
from infd.http.auth import Keys
from infd.http.store.memory import MemoryStore
from infd.http.store.sqlite import SqliteStore
from infd.mcp.servers import Servers
from infd.offload import Offload
from infd.telemetry.metrics import Metrics
from tests.fakes import FakeExecutor, capacity
from tests.http.model import served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.grammar.protocol import Grammars


class Endpoint:
    """A running endpoint, and a client session for requests to it."""

    def __init__(self, server: HttpServer, engine: Engine, executor: FakeExecutor, url: str) -> None:
        self.server = server
        self.engine = engine
        self.executor = executor
        self.url = url
        self.session = aiohttp.ClientSession(url)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the decoded body of the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=BytesIO(data), headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        status, body = await self.post("/v1/completions", {"prompt": [5, 6, 7], "seed": 0, **fields})
        assert status == 200, body
        return body

    async def chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        status, body = await self.post("/v1/chat/completions", {"messages": messages, "seed": 0, **fields})
        assert status == 200, body
        return body

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the decoded events of a stream, except the end marker, which is checked."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
        return decode_events(text)

    async def named_events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the decoded events of a stream whose events have names, which are checked."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
        return decode_named_events(text)

    async def idle(self) -> None:
        """Wait until the engine has no running and no waiting request."""
        while (status := self.engine.status()).running or status.waiting:
            await asyncio.sleep(0)


def decode_events(text: str) -> list[Any]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]


def decode_named_events(text: str) -> list[Any]:
    """Return the data of events; check that the name of each event is its type."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@asynccontextmanager
async def serving(
    config: Config | None = None,
    *,
    keys: Keys | None = None,
    executor: FakeExecutor | None = None,
    grammars: Grammars | None = None,
    load: bool = True,
    **defaults: float,
) -> AsyncIterator[Endpoint]:
    """Run an endpoint. With `load` False no model is loaded."""
    config = config or Config()
    executor = executor or FakeExecutor(capacity(pages=512, rows=16, step_tokens=64, max_model_len=256))
    metrics = Metrics()
    live = LiveConfig(config)
    engine = Engine(live, executor, metrics, grammars=grammars, drafting=drafting(config.scheduler))
    offload = Offload()
    store = SqliteStore(live, offload) if config.store.path else MemoryStore(live)
    await store.open()
    server = HttpServer(engine, live, metrics, keys or Keys(), offload, store, Servers.read(config.mcp))
    listening = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listening.getsockname())
    await server.start([listening])
    running = asyncio.create_task(engine.run()) if load else None
    while load and engine.lifecycle.state is State.STARTING:
        await asyncio.sleep(0)
    if engine.loaded:
        server.served = served(engine.core.capacity.max_model_len, **defaults)
    endpoint = Endpoint(server, engine, executor, url)
    try:
        yield endpoint
    finally:
        await endpoint.session.close()
        engine.stop()
        if running is not None:
            await running
        await server.close()
        await engine.close()
        offload.close()
