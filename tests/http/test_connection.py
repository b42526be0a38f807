"""Requests at the edges of HTTP/1.x, and how a connection is closed."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from infd.config import Config, ServerConfig
from infd.http import connection, headers
from infd.http.auth import Keys
from tests.fakes import FakeExecutor, capacity
from tests.http.endpoint import serving
from tests.http.test_connections import connect, said
from tests.http.test_streaming import COMPLETIONS, until

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

BODY = msgspec.json.encode({"prompt": [5, 6, 7], "max_tokens": 2, "seed": 0})
CLOSE = b"Connection: close\r\n"


def post(body: bytes, *headers: str, version: str = "1.1", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = (f"POST {COMPLETIONS} HTTP/{version}", "Host: a", *headers)
    framed = lines if any("Transfer" in line for line in headers) else (*lines, f"Content-Length: {size}")
    return "\r\n".join((*framed, "", "")).encode() + body


async def converse(endpoint: Endpoint, sent: bytes, *, ended: bool = False) -> tuple[bytes, bytes]:
    """Return the headers and the body that the server sends until it closes the connection."""
    client = await connect(endpoint, sent)
    if ended:
        client.shutdown(socket.SHUT_WR)
    head, _, body = (await said(client)).partition(b"\r\n\r\n")
    return head + b"\r\n", body


async def answered(client: socket.socket) -> None:
    """Wait until bytes can be received."""
    await until(lambda: select.select([client], [], [], 0)[0])


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/0.9\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/1.2\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/3.0\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post(BODY, version="2.0"),
        post(b"", version="2.0", length=100),
    ],
)
async def test_another_version_of_http_is_505_in_ours(endpoint: Endpoint, sent: bytes):
    head, body = await converse(endpoint, sent)

    assert head.startswith(b"HTTP/1.1 505 ")
    assert CLOSE in head
    assert code(body) == "http_version_not_supported"
    assert endpoint.server.service.metrics.rejected == {"http_version_not_supported": 1}


async def test_another_version_is_refused_before_a_key_is_asked_for():
    async with serving(keys=Keys.of("secret")) as endpoint:
        head, _ = await converse(endpoint, post(BODY, version="2.0"))

    assert head.startswith(b"HTTP/1.1 505 ")


async def test_an_older_client_is_answered_in_our_version(endpoint: Endpoint):
    head, _ = await converse(endpoint, b"GET /livez HTTP/1.0\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")
    assert CLOSE in head


async def test_chunks_in_http_1_0_are_400_and_the_connection_is_closed(endpoint: Endpoint):
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    head, body = await converse(
        endpoint, post(chunked, "Transfer-Encoding: chunked", "Connection: keep-alive", version="1.0")
    )

    assert head.startswith(b"HTTP/1.1 400 ")
    assert CLOSE in head
    assert code(body) == "invalid_http"


async def test_a_stream_for_an_older_client_ends_with_its_connection(endpoint: Endpoint):
    body = msgspec.json.encode({"prompt": [5, 6, 7], "stream": True, "seed": 0})
    head, answer = await converse(endpoint, post(body, "Connection: keep-alive", version="1.0"))

    assert CLOSE in head
    assert answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HT",
        b"GET /livez HTTP/1.1\r\nHost: a\r\n",
        post(b"{", length=100),
        post(b"", length=100),
        post(b"5\r\n{", "Transfer-Encoding: chunked"),
        post(b"1\r\n{\r\n", "Transfer-Encoding: chunked"),
        post(b"{", length=100).replace(COMPLETIONS.encode(), b"/nowhere"),
    ],
)
async def test_an_input_that_ends_within_a_request_is_400_and_the_connection_is_closed(endpoint: Endpoint, sent: bytes):
    head, body = await converse(endpoint, sent, ended=True)

    # Since Python 3.12 an unknown path is answered before the end of input is seen, on a keep-alive connection.
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    assert CLOSE in head or head.startswith(b"HTTP/1.1 404 ")
    assert code(body) in ("invalid_http", "unknown_path")


async def test_an_input_that_ends_while_a_body_is_awaited_is_400(endpoint: Endpoint):
    client = await connect(endpoint, post(b"{", length=100))
    await until(lambda: endpoint.server.service.bodies_bytes)
    client.shutdown(socket.SHUT_WR)
    head, _, body = (await said(client)).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert code(body) == "invalid_http"
    assert endpoint.server.service.bodies_bytes == 0


async def test_requests_before_an_incomplete_one_are_answered(endpoint: Endpoint):
    _, rest = await converse(endpoint, post(BODY) + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" + b"GET /", ended=True)

    assert rest.count(b"HTTP/1.1 200 ") == 1
    assert rest.count(b"HTTP/1.1 400 ") == 1


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_an_input_that_ends_between_requests_is_answered_with_the_end(endpoint: Endpoint, sent: bytes):
    assert await converse(endpoint, sent, ended=True) == (b"\r\n", b"")


async def test_an_input_that_ends_after_a_whole_request_ends_its_work():
    executor = FakeExecutor(capacity(pages=512, rows=16, step_tokens=64, max_model_len=256))
    executor.gate.clear()
    async with serving(executor=executor) as endpoint:
        client = await connect(endpoint, post(BODY))
        await until(endpoint.engine.requests)
        client.shutdown(socket.SHUT_WR)

        assert await said(client) == b""
        assert not endpoint.engine.requests()


async def test_a_malformed_chunk_is_400_at_once(endpoint: Endpoint):
    client = await connect(endpoint, post(b"1\r\n{\r\n", "Transfer-Encoding: chunked"))
    await until(lambda: endpoint.server.service.bodies_bytes)
    await asyncio.get_running_loop().sock_sendall(client, b"zz\r\n")
    head, _, body = (await said(client)).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert code(body) == "invalid_http"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"HELO there\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (post(b"zz\r\n", "Transfer-Encoding: chunked"), 400),
        (post(b"1\r\n{\r\n", "Transfer-Encoding: chunked").replace(COMPLETIONS.encode(), b"/nowhere"), 404),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 200),
    ],
)
async def test_a_client_that_keeps_sending_gets_the_answer_without_a_reset(
    endpoint: Endpoint, sent: bytes, status: int
):
    loop = asyncio.get_running_loop()
    client = await connect(endpoint, sent)
    await answered(client)
    for _ in range(20):
        await loop.sock_sendall(client, b"x" * 50_000)
        await asyncio.sleep(0)
    answer = await said(client)

    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.partition(b"\r\n\r\n")[2]


async def test_a_refused_clients_body_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(headers, "LINGER_BYTES", 1000)
    async with serving() as endpoint:
        client = await connect(endpoint, b"HELO there\r\n\r\n")
        await answered(client)
        assert endpoint.server.service.metrics.connections == 1
        await asyncio.get_running_loop().sock_sendall(client, b"x" * 2000)

        await until(lambda: endpoint.server.service.metrics.connections == 0)
        client.close()


async def test_a_refused_client_that_never_closes_is_read_for_so_long_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.02)
    async with serving() as endpoint:
        client = await connect(endpoint, b"HELO there\r\n\r\n")

        await answered(client)
        await until(lambda: endpoint.server.service.metrics.connections == 0)
        client.close()


async def test_a_refusal_keeps_the_connection_where_its_small_body_still_comes():
    async with serving(keys=Keys.of("secret")) as endpoint:
        client = await connect(endpoint, post(b"", length=len(BODY)))
        await answered(client)
        await asyncio.get_running_loop().sock_sendall(client, BODY + post(BODY, "Connection: close"))
        answer = await said(client)

    assert answer.count(b"HTTP/1.1 401 ") == 2


async def test_a_refusal_of_a_large_body_that_still_comes_closes_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(headers, "LINGER_BYTES", 1000)
    async with serving(Config(server=ServerConfig(max_body_bytes=500))) as endpoint:
        head, body = await converse(endpoint, post(b"{", length=2000))

    assert head.startswith(b"HTTP/1.1 413 ")
    assert CLOSE in head
    assert code(body) == "body_too_large"


async def test_a_body_cut_off_while_it_is_discarded_is_no_error(endpoint: Endpoint, caplog: pytest.LogCaptureFixture):
    client = await connect(endpoint, post(b"{", length=100).replace(COMPLETIONS.encode(), b"/nowhere"))
    await answered(client)
    client.shutdown(socket.SHUT_WR)

    assert (await said(client)).startswith(b"HTTP/1.1 404 ")
    await until(lambda: endpoint.server.service.metrics.connections == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
