"""The connections of measured requests: bodies of every framing, reuse, and ends before an answer is whole."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from infd.loadgen.connections import Connections, Malformed, NotConnected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n"
CONTINUED = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED
CLOSING = SIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
GONE = SIZED.replace(b"OK", b"ok")  # the server closes the connection behind it, without saying so
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nhello"


class Server:
    """Answers each request of any connection with the next of some answers.

    connections  accepted so far
    requests     received so far
    """

    def __init__(self, answers: Sequence[bytes], piece: int) -> None:
        self.connections = 0
        self.requests: list[bytes] = []
        self._answers = iter(answers)
        self._piece = piece

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        answer = SIZED
        while answer in (SIZED, CHUNKED, CONTINUED):
            self.requests.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4))
            answer = next(self._answers)
            for at in range(0, len(answer), self._piece):
                writer.write(answer[at : at + self._piece])
                await asyncio.sleep(0)
        writer.close()


@asynccontextmanager
async def serving(*answers: bytes, piece: int = 1000) -> AsyncIterator[tuple[Server, str]]:
    server = Server(answers, piece)

    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await server.serve(reader, writer)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/embeddings?a=b"
    finally:
        listening.close()
        for writer in writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    connections = Connections(None)
    yield connections
    connections.close()
    await asyncio.sleep(0)


async def ask(connections: Connections, url: str) -> bytes:
    answer = await connections.post(url, b"body", {"X-Given": "1"})
    try:
        assert answer.status == 200
        return await answer.read()
    finally:
        answer.close()


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_bodies_of_all_framings_are_read_however_they_arrive(connections: Connections, piece: int) -> None:
    async with serving(SIZED, CHUNKED, CONTINUED, ENDLESS, SIZED, CLOSING, SIZED, piece=piece) as (server, url):
        assert [await ask(connections, url) for _ in range(7)] == [b"hello"] * 7
        assert server.connections == 3, "only answers that end or close the connection take another"
        assert set(server.requests) == {
            b"POST /v1/embeddings?a=b HTTP/1.1\r\nHost: %b\r\nX-Given: 1\r\nContent-Length: 4\r\n\r\nbody"
            % url.split("/")[2].encode()
        }


async def test_pieces_are_yielded_as_they_arrive(connections: Connections) -> None:
    async with serving(CHUNKED) as (_, url):
        answer = await connections.post(url, b"body", {})
        assert [piece async for piece in answer.pieces()] == [b"hel", b"lo"]
        answer.close()


@pytest.mark.parametrize("answer", [SIZED[:-1], CHUNKED[:-4], CHUNKED[:60], SIZED[:20]])
async def test_an_answer_that_ends_early_is_an_error(connections: Connections, answer: bytes) -> None:
    async with serving(answer) as (_, url):
        with pytest.raises(ConnectionResetError):
            await ask(connections, url)


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n.", CHUNKED.replace(b"3;x=1", b"three") + b"."])
async def test_other_bytes_than_http_are_an_error(connections: Connections, answer: bytes) -> None:
    async with serving(answer) as (_, url):
        with pytest.raises(Malformed):
            await ask(connections, url)


async def test_a_connection_that_the_server_closed_between_requests_is_not_used_again(connections: Connections) -> None:
    async with serving(GONE, SIZED) as (server, url):
        await ask(connections, url)
        await asyncio.sleep(0.05)  # until the end has arrived
        assert await ask(connections, url) == b"hello"
        assert server.connections == 2


async def test_an_answer_that_is_left_closes_its_connection(connections: Connections) -> None:
    async with serving(SIZED, SIZED) as (server, url):
        answer = await connections.post(url, b"body", {})
        answer.close()
        assert await ask(connections, url) == b"hello"
        assert server.connections == 2


async def test_the_url_names_the_user(connections: Connections) -> None:
    async with serving(SIZED) as (server, url):
        await ask(connections, url.replace("//", "//ann:p%40ss@"))
        assert b"\r\nAuthorization: Basic YW5uOnBAc3M=\r\n" in server.requests[0]


async def test_a_server_that_is_not_there_is_named_by_the_systems_error(connections: Connections) -> None:
    async with serving() as (_, url):
        pass
    with pytest.raises(NotConnected) as raised:
        await ask(connections, url)
    assert isinstance(raised.value.reason, ConnectionRefusedError)


async def test_headers_may_have_any_characters(connections: Connections) -> None:
    async with serving(SIZED) as (server, url):
        answer = await connections.post(url, b"body", {"X-Label": "naïve €"})
        assert await answer.read() == b"hello"
        answer.close()
    assert "X-Label: naïve €\r\n".encode() in server.requests[0]
