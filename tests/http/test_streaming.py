"""Slow readers, disconnects, and pings during a long wait for the first token."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.config import Config, ServerConfig
from infd.engine.streams.stream import PENDING_BYTES
from infd.errors import ServerStopped
from infd.http import app, connection, sse
from tests.fakes import FakeExecutor, capacity
from tests.http.endpoint import Endpoint, decode_events, serving
from tests.http.model import foretell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

COMPLETIONS = "/v1/completions"


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):  # reached only if the test fails
        while not true():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def held(**options: Any) -> AsyncIterator[Endpoint]:
    """Run an endpoint whose steps complete only after the executor's gate is set."""
    executor = FakeExecutor(capacity(pages=512, rows=16, step_tokens=64, max_model_len=256))
    executor.gate.clear()
    async with serving(executor=executor, **options) as endpoint:
        yield endpoint
        executor.gate.set()


def raw(endpoint: Endpoint, body: dict[str, Any], *, version: str = "1.1") -> socket.socket:
    """Send a request without reading the response."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    data = msgspec.json.encode(body)
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    client.setblocking(False)
    return client


def weight(value: Any) -> int:
    """Return the size in bytes of a value and its parts."""
    parts: Any = ()
    if isinstance(value, msgspec.Struct):
        parts = (getattr(value, name) for name in value.__struct_fields__)
    elif isinstance(value, list | tuple):
        parts = value
    return sys.getsizeof(value) + sum(map(weight, parts))


def held_for_readers(endpoint: Endpoint) -> int:
    """Return the size in bytes of all deltas not yet taken by handlers."""
    flows = [flow for ticket in endpoint.engine.admission for flow in ticket.choices]
    return sum(weight(flow.stream._pending) for flow in flows)


BOUND = 2 * sse.HIGH_WATER + 64  # the buffer limit, one slice, and framing
LONG = {"prompt": [5, 6, 7], "seed": 0, "n": 4, "max_tokens": 250, "logprobs": 20, "stream": True}


@pytest.fixture
async def roomy() -> AsyncIterator[Endpoint]:
    limits = capacity(pages=1024, rows=16, step_tokens=64, max_model_len=1024)
    async with serving(executor=FakeExecutor(limits)) as endpoint:
        yield endpoint


@pytest.mark.parametrize("n", [1, 4])
async def test_a_slow_reader_buffers_little_and_delays_no_other_stream(roomy: Endpoint, n: int):
    endpoint, long = roomy, {**LONG, "n": n, "max_tokens": 1000 // n}
    whole = await endpoint.events(COMPLETIONS, long)
    client = raw(endpoint, long)
    streams = endpoint.server.service.streams
    await until(lambda: any(stream.buffered_bytes for stream in streams))

    most = 0
    for _ in range(3):
        assert await endpoint.events(COMPLETIONS, {**LONG, "n": 1})
        most = max(most, *(stream.buffered_bytes for stream in streams))
        for _ in range(sse.BEATS_TO_PING):
            await streams.beat()  # must not insert a comment into an event
    await endpoint.idle()

    (slow,) = streams
    assert 0 < slow.buffered_bytes <= most <= BOUND
    assert PENDING_BYTES / 2 < held_for_readers(endpoint) < 1.2 * PENDING_BYTES
    (row,) = endpoint.engine.requests()
    assert row.generated_tokens < 500, "tokens are computed for an absent reader"
    assert endpoint.engine.status().pages_referenced == 0, "and it holds no page"
    received = await read_all(client, lambda data: data.endswith(b"0\r\n\r\n"))
    assert len(received) > 3 * BOUND
    assert joined_text(dechunk(received)) == joined_text(whole)


def joined_text(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def read_all(client: socket.socket, complete: Callable[[bytes], bool]) -> bytes:
    received = bytearray()
    loop = asyncio.get_running_loop()
    while not complete(received[-16:]):
        data = await loop.sock_recv(client, 2**16)
        assert data
        received += data
    client.close()
    return bytes(received)


def dechunk(received: bytes) -> list[Any]:
    _, _, rest = received.partition(b"\r\n\r\n")
    text = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        text += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return decode_events(text.decode())


async def test_a_client_of_http_1_0_gets_the_same_events_unchunked(endpoint: Endpoint):
    said = {"prompt": [5, 6, 7], "seed": 0, "max_tokens": 20, "stream": True}
    client = raw(endpoint, said, version="1.0")
    received = b""
    while data := await asyncio.get_running_loop().sock_recv(client, 2**16):
        received += data
    client.close()

    head, _, events = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert joined_text(decode_events(events.decode())) == joined_text(await endpoint.events(COMPLETIONS, said))


async def test_a_reader_that_stops_reading_is_dropped(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "STALL_S", 0.02)
    client = raw(endpoint, LONG)

    await until(lambda: list(endpoint.server.service.streams))
    await until(lambda: not list(endpoint.server.service.streams))

    await endpoint.idle()
    assert endpoint.engine.status().pages_referenced == 0
    client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_before_the_first_token_ends_the_work(stream: bool):
    async with held() as endpoint:
        client = raw(endpoint, {"prompt": [5, 6, 7], "max_tokens": 250, "stream": stream})
        await until(endpoint.engine.requests)

        client.close()

        await until(lambda: not endpoint.engine.requests())
        endpoint.executor.gate.set()
        await endpoint.idle()
        assert endpoint.engine.status().pages_referenced == 0


async def test_a_disconnect_during_a_stream_ends_the_work():
    async with serving(executor=FakeExecutor(step_s=0.001)) as endpoint:
        response = await endpoint.session.post(
            COMPLETIONS, json={"prompt": [5, 6, 7], "max_tokens": 250, "stream": True}
        )
        await response.content.readuntil(b"\n\n")
        (row,) = endpoint.engine.requests()

        response.close()

        await until(lambda: not endpoint.engine.requests())
        assert row.generated_tokens < 250
        await endpoint.idle()
        assert endpoint.engine.status().pages_referenced == 0


async def test_disconnects_change_no_other_clients_tokens(endpoint: Endpoint):
    async def leave(number: int) -> None:
        said = {"prompt": [5, 6, number], "max_tokens": 200, "stream": True}
        response = await endpoint.session.post(COMPLETIONS, json=said)
        await response.content.readuntil(b"\n\n")
        response.close()

    prompts = [[10 + number, 90 + number] for number in range(16)]
    answers, *_ = await asyncio.gather(
        asyncio.gather(*(endpoint.complete(prompt=prompt, max_tokens=60) for prompt in prompts)),
        *(leave(20 + number) for number in range(16)),
    )

    assert [body["choices"][0]["text"] for body in answers] == [foretell(prompt, 60)[1] for prompt in prompts]
    await endpoint.idle()
    assert endpoint.engine.status().pages_referenced == 0


async def test_a_stream_without_tokens_gets_headers_and_then_comments():
    async with held() as endpoint:
        streams = endpoint.server.service.streams
        asking = asyncio.create_task(endpoint.session.post(COMPLETIONS, json={"prompt": [5, 6, 7], "stream": True}))
        await until(lambda: list(streams))
        (stream,) = streams

        await streams.beat()
        assert not stream.begun
        await streams.beat()
        response = await asking
        assert await response.content.readuntil(b"\n\n") == sse.PING
        for _ in range(sse.BEATS_TO_PING):
            await streams.beat()
        assert await response.content.readuntil(b"\n\n") == sse.PING

        endpoint.executor.gate.set()
        assert decode_events(await response.text())
        assert not list(streams)


PAUSED = pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [5, 6, 7], "seed": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": 0}),
    ],
)


@asynccontextmanager
async def held_stream(
    path: str, body: dict[str, Any], *, beats: int = sse.BEATS_TO_HEADERS, **server: float
) -> AsyncIterator[tuple[Endpoint, asyncio.Task[Any]]]:
    """Run a paused endpoint with a stream held for `beats` beats."""
    async with serving(Config(server=ServerConfig(**server))) as endpoint:
        await endpoint.engine.control.pause("keep", "hold").result()
        asking = asyncio.create_task(endpoint.session.post(path, json={**body, "stream": True}))
        await until(lambda: endpoint.engine.status().held)
        for _ in range(beats):
            await endpoint.server.service.streams.beat()
        yield endpoint, asking
        await until(lambda: not endpoint.engine.status().tickets)
        assert not list(endpoint.server.service.streams)


@PAUSED
async def test_a_stream_held_before_a_paused_engine_gets_headers_comments_and_its_answer(path: str, body: Any):
    async with held_stream(path, body) as (endpoint, asking):
        async with await asking as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == sse.PING
            for _ in range(sse.BEATS_TO_PING):
                await endpoint.server.service.streams.beat()
            assert await response.content.readuntil(b"\n\n") == sse.PING
            endpoint.engine.control.resume()
            late = decode_events(await response.text())
        at_once = await endpoint.events(path, body)
        said = [[event["choices"] for event in events] for events in (late, at_once)]
        assert said[0] == said[1]


@PAUSED
async def test_a_refusal_before_the_headers_are_sent_is_a_status(path: str, body: Any):
    async with held_stream(path, body, beats=sse.BEATS_TO_HEADERS - 1) as (endpoint, asking):
        await endpoint.engine.control.pause("keep", "reject").result()
        response = await asking
        assert (response.status, (await response.json())["error"]["code"]) == (503, "paused")


@PAUSED
async def test_an_error_after_a_held_streams_headers_is_its_last_event(path: str, body: Any):
    async with held_stream(path, body) as (endpoint, asking):
        response = await asking
        await endpoint.engine.control.pause("keep", "reject").result()
        (event,) = decode_events(await response.text())
        assert event["error"]["code"] == "paused"
        assert endpoint.server.service.metrics.rejected == {"paused": 1}


@pytest.mark.parametrize("limit", ["hold_timeout_s", "queue_timeout_s", "request_timeout_s"])
async def test_time_held_counts_toward_the_limit_whose_error_is_an_event(limit: str):
    async with held_stream(COMPLETIONS, {"prompt": [5, 6, 7]}, **{limit: 0.3}) as (_, asking):
        (event,) = decode_events(await (await asking).text())
        codes = {"hold_timeout_s": "paused", "queue_timeout_s": "queue_timeout", "request_timeout_s": "request_timeout"}
        assert event["error"]["code"] == codes[limit]


async def test_a_held_requests_own_error_is_an_event_of_its_stream():
    async with held_stream(COMPLETIONS, {"prompt": [5] * 300}) as (endpoint, asking):
        response = await asking
        endpoint.engine.control.resume()
        (event,) = decode_events(await response.text())
        assert event["error"]["code"] == "context_length_exceeded"
        assert endpoint.server.service.metrics.rejected == {"context_length_exceeded": 1}


async def test_a_client_that_leaves_while_it_is_held_is_forgotten():
    async with held_stream(COMPLETIONS, {"prompt": [5, 6, 7]}) as (endpoint, asking):
        (await asking).close()
        await until(lambda: not endpoint.engine.status().held)


async def test_pings_go_past_a_reader_that_has_stalled():
    async with held() as endpoint:
        endpoint.executor.gate.set()
        streams = endpoint.server.service.streams
        stalled = [raw(endpoint, LONG) for _ in range(8)]
        await until(lambda: sum(bool(stream.buffered_bytes) for stream in streams) == len(stalled))
        endpoint.executor.gate.clear()
        asking = asyncio.create_task(endpoint.session.post(COMPLETIONS, json={"prompt": [5, 6, 7], "stream": True}))
        await until(lambda: len(list(streams)) > len(stalled))

        async with asyncio.timeout(20):  # reached only if the test fails
            for _ in range(sse.BEATS_TO_PING):  # the stream has been quiet for this time
                await streams.beat()
            response = await asking
        assert await response.content.readuntil(b"\n\n") == sse.PING

        endpoint.executor.gate.set()
        assert decode_events(await response.text())
        for client in stalled:
            client.close()


async def test_a_stream_that_is_busy_gets_no_comments(endpoint: Endpoint):
    async with endpoint.session.post(COMPLETIONS, json={"prompt": [5, 6, 7], "stream": True}) as response:
        text = await response.text()

    assert ": ping" not in text


async def test_an_aborted_request_ends_with_its_reason():
    async with held() as endpoint:
        asking = asyncio.create_task(endpoint.complete())
        await until(endpoint.engine.requests)

        assert endpoint.engine.abort(endpoint.engine.requests()[0].id)

        body = await asking
        assert body["choices"][0]["finish_reason"] == "abort"


async def test_closing_the_server_leaves_no_connection_and_no_task():
    before = asyncio.all_tasks()
    async with held() as endpoint:
        client = raw(endpoint, {"prompt": [5, 6, 7], "stream": True})
        await until(endpoint.engine.requests)
        endpoint.engine.fail_all(RuntimeError("stopping"))
        received = await read_all(client, lambda data: data.endswith(b"}}"))

    assert received.startswith(b"HTTP/1.1 500 ")
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_reader_that_does_not_read_does_not_hold_up_closing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "SHUTDOWN_S", 0.01)
    async with serving() as endpoint:
        client = raw(endpoint, LONG)
        streams = endpoint.server.service.streams
        await until(lambda: any(stream.buffered_bytes for stream in streams))
        await endpoint.idle()
    client.close()


async def test_at_a_stop_every_reader_gets_one_error_event_and_the_log_few_lines(endpoint: Endpoint, caplog):
    endpoint.executor.gate.clear()
    asked = [
        asyncio.create_task(
            endpoint.session.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 50, "stream": stream})
        )
        for stream in (True, False) * 40
    ]
    while endpoint.engine.core.in_flight.accepted < len(asked):
        await asyncio.sleep(0)
    endpoint.engine.fail_all(ServerStopped())
    answers = await asyncio.gather(*asked)

    assert {answer.status for answer in answers} == {503}
    assert {(await answer.json())["error"]["code"] for answer in answers} == {"draining"}
    assert not [record for record in caplog.records if record.exc_info]
    endpoint.executor.gate.set()
