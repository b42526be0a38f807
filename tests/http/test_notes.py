"""What is noted of a request follows its answer, and is noted whatever becomes of the client and the server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from infd.config import Config, LogConfig
from tests.http.endpoint import serving
from tests.http.test_streaming import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.endpoint import Endpoint

SLOW = Config(log=LogConfig(slow_s=0))  # every inference request is logged as slow
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
NOTES = ["infd.access", "infd.slow"]


class Notes(logging.Handler):
    """The notes of requests, in order, each with what its client could read when the note was written."""

    def __init__(self) -> None:
        super().__init__()
        self.client: socket.socket | None = None
        self.found: list[tuple[logging.LogRecord, bytes]] = []

    def emit(self, record: logging.LogRecord) -> None:
        readable = b""
        if self.client is not None:
            with suppress(BlockingIOError):
                readable = self.client.recv(2**16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        self.found.append((record, readable))

    @property
    def names(self) -> list[str]:
        return sorted(record.name for record, _ in self.found)

    @property
    def status(self) -> int:
        """Status in the only access line."""
        (status,) = [record.status for record, _ in self.found if record.name == "infd.access"]  # type: ignore[attr-defined]
        return int(status)


@pytest.fixture
def notes() -> Iterator[Notes]:
    handler, loggers = Notes(), [logging.getLogger(name) for name in NOTES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


async def send(endpoint: Endpoint, notes: Notes | None = None) -> socket.socket:
    """Send a request on a connection of its own. notes: peek at what its client can read."""
    host, _, port = endpoint.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)))
    client.setblocking(False)
    if notes is not None:
        notes.client = client
    await asyncio.get_running_loop().sock_sendall(client, REQUEST)
    return client


async def test_an_answer_is_written_before_its_notes(notes: Notes):
    async with serving(SLOW) as endpoint:
        with closing(await send(endpoint, notes)):
            await until(lambda: len(notes.found) == 2)

    assert notes.names == NOTES
    for _, readable in notes.found:
        head, _, body = readable.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert json.loads(body)["usage"]["completion_tokens"] == 2


async def test_a_request_whose_client_has_left_is_noted(notes: Notes):
    async with serving(SLOW) as endpoint:
        endpoint.executor.gate.clear()
        client = await send(endpoint)
        await until(lambda: endpoint.engine.status().running == 1)
        client.close()
        await until(lambda: len(notes.found) == 2)
        endpoint.executor.gate.set()

    assert notes.names == NOTES
    assert notes.status == 499
    assert [*endpoint.engine.metrics.http_requests.values()] == [1]


async def test_a_request_answered_while_the_server_closes_is_noted(notes: Notes):
    async with serving(SLOW) as endpoint:
        endpoint.executor.gate.clear()
        with closing(await send(endpoint)):
            await until(lambda: endpoint.engine.status().running == 1)
            closed = asyncio.create_task(endpoint.server.close())
            await asyncio.sleep(0)
            endpoint.executor.gate.set()
            await closed
            assert notes.names == NOTES
            assert notes.status == 200
            assert [*endpoint.engine.metrics.http_requests.values()] == [1]
