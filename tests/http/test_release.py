"""A request's objects are freed with its answer, without the garbage collector: no reference cycle keeps them."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from infd.engine.admission.ticket import Ticket
from infd.engine.streams.choice import ChoiceState
from infd.engine.streams.stream import Choices, Delta, Inbox, Stream
from infd.errors import InfdError
from infd.http.answer import Answer, ChoiceDelta
from infd.http.connection import Connection
from infd.http.exchange import Exchange
from infd.http.schema.chat import ChatRequest
from infd.http.schema.completions import CompletionRequest
from infd.http.sse import EventStream
from infd.request import Request
from infd.scheduler.sequence import Sequence
from infd.text.reply import Reply
from tests.http.endpoint import serving
from tests.http.test_connections import connect
from tests.http.test_streaming import COMPLETIONS, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from infd.scheduler.plan import StepPlan
    from tests.http.endpoint import Endpoint

CHAT = "/v1/chat/completions"
WORK = (Ticket, ChoiceState, Choices, Inbox, Stream, Sequence, Request, Reply, Answer, CompletionRequest, Exchange)
OWNERS = (*WORK, Delta, ChoiceDelta, ChatRequest, EventStream, InfdError)


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    """Disable the garbage collector, and exclude objects created earlier."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    gc.collect()
    async with serving() as endpoint:
        yield endpoint


@pytest.fixture
def silence() -> Iterator[None]:
    """Disable logging: pytest keeps log records, and records keep tracebacks."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Client:
    """A request on a connection that stays open after the answer, as a server may keep objects for the connection."""

    def __init__(self, endpoint: Endpoint, body: Any, path: str = COMPLETIONS) -> None:
        self._address = endpoint.url.removeprefix("http://").split(":")
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._sent = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)

    async def __aenter__(self) -> Client:
        self.reader, self._writer = await asyncio.open_connection(*self._address)
        self._writer.write(self._sent)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def answer(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        if b"chunked" in head:
            return head + await self.reader.readuntil(b"\r\n0\r\n\r\n")
        (length,) = [line for line in head.splitlines() if line.startswith(b"Content-Length: ")]
        return head + await self.reader.readexactly(int(length.split()[1]))


def owners() -> list[str]:
    return [type(each).__name__ for each in gc.get_objects() if isinstance(each, OWNERS)]


async def released(endpoint: Endpoint) -> bool:
    """Wait at most a second until no object of the types in OWNERS exists; return whether none exists."""
    for _ in range(200):
        endpoint.executor.issued.clear()  # FakeExecutor keeps every step, for other tests
        if not owners():
            return True
        await asyncio.sleep(0.005)
    return False


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": [5, 6, 7], "seed": 0, "max_tokens": 5, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "seed": 0, "max_tokens": 5, **fields}


ANSWERED = [
    (COMPLETIONS, completion()),
    (COMPLETIONS, completion(n=3, temperature=1, logprobs=2)),
    (COMPLETIONS, completion(n=2, temperature=1, best_of=3)),
    (COMPLETIONS, completion(stream=True)),
    (COMPLETIONS, completion(stream=True, n=3, temperature=1)),
    (COMPLETIONS, completion(echo=True, prompt_logprobs=1)),
    (CHAT, chat()),
    (CHAT, chat(stream=True, logprobs=True)),
]


@pytest.mark.parametrize(("path", "body"), ANSWERED)
async def test_nothing_is_left_of_an_answered_request(endpoint: Endpoint, path: str, body: dict[str, Any]):
    async with Client(endpoint, body, path) as client:
        assert b" 200 OK" in await client.answer()

        assert await released(endpoint), owners()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, b"{", 400),
        (COMPLETIONS, b"{" + b" " * 100_000, 400),  # decoded on a thread
        (COMPLETIONS, completion(temperature=9), 400),
        (COMPLETIONS, completion(prompt=[5] * 300), 400),
        (COMPLETIONS, completion(prompt="a" * 5000), 400),
        (COMPLETIONS, completion(model="another"), 404),
        (COMPLETIONS, completion(stream=True, prompt=[600]), 400),
        ("/nowhere", completion(), 404),
        (CHAT, chat(messages=[{"role": "user", "content": "refuse me"}]), 400),
    ],
)
async def test_nothing_is_left_of_a_refused_request(endpoint: Endpoint, path: str, body: Any, status: int):
    async with Client(endpoint, body, path) as client:
        assert b" %d " % status in (await client.answer()).splitlines()[0]

        assert await released(endpoint), owners()


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_left_of_a_request_whose_client_left(endpoint: Endpoint, stream: bool):
    endpoint.executor.gate.clear()
    async with Client(endpoint, completion(max_tokens=200, stream=stream)):
        await until(endpoint.engine.requests)
        assert {each.__name__ for each in WORK} <= set(owners())
    endpoint.executor.gate.set()

    assert await released(endpoint), owners()


async def test_nothing_is_left_of_a_stream_that_was_left_in_the_middle(endpoint: Endpoint):
    async with Client(endpoint, completion(max_tokens=200, stream=True, n=4, temperature=1, logprobs=20)) as client:
        await client.reader.readuntil(b"data: ")

    assert await released(endpoint), owners()


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_left_of_an_aborted_request(endpoint: Endpoint, stream: bool):
    endpoint.executor.gate.clear()
    async with Client(endpoint, completion(stream=stream)) as client:
        await until(endpoint.engine.requests)
        endpoint.engine.admission.abort_all()
        endpoint.executor.gate.set()
        await client.answer()

        assert await released(endpoint), owners()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_left_of_a_request_that_failed(
    endpoint: Endpoint, silence: None, stream: bool, n: int, begun: bool
):
    def fault(plan: StepPlan) -> None:
        if not begun or any(span.start > 8 for span in plan.spans):
            raise RuntimeError("broken")

    endpoint.executor.fault = fault
    async with Client(endpoint, completion(stream=stream, n=n, temperature=1, max_tokens=20)) as client:
        assert b"internal_error" in await client.answer()
        await endpoint.idle()

        assert await released(endpoint), owners()


@pytest.mark.parametrize("body", [b"", b"{"])
async def test_nothing_is_left_of_a_connection_that_ends_within_a_body(endpoint: Endpoint, body: bytes):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    client = await connect(endpoint, head + body)
    await until(lambda: endpoint.server.service.metrics.connections)
    await asyncio.sleep(0)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    await until(lambda: not endpoint.server.service.metrics.connections)

    assert await released(endpoint), owners()
    await until(lambda: not any(isinstance(each, Connection) for each in gc.get_objects()))
