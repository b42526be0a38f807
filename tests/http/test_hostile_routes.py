"""Slow, hostile and vanished clients of every route cost no neighbour a token."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from infd.http import sse
from infd.http.openapi.operations import OPERATIONS
from tests.fakes import FakeExecutor, capacity
from tests.http.endpoint import serving
from tests.http.model import foretell
from tests.http.test_streaming import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.endpoint import Endpoint

USER = {"role": "user", "content": "hi"}
ITEM = {"type": "message", "role": "user", "content": "hi"}
# The routes that read a body, each with a body that it answers.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 900},
    "/v1/responses": {"input": "a"},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/messages/render": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/conversations": {"items": [ITEM]},
    "/v1/conversations/{id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{id}/items": {"items": [ITEM]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"input": ["a", "b"]},
    "/pooling": {"input": [5, 6], "task": "token_embed"},
    "/classify": {"messages": [USER]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/embed_sparse": {"inputs": "a"},
    "/predict": {"inputs": "a"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
}
GENERATING = [operation.path for operation in OPERATIONS if operation.streams and operation.request is not None]
LONG: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 900, "logprobs": True, "top_logprobs": 20},
    "/v1/completions": {"max_tokens": 900, "logprobs": 20},
    "/v1/messages": {"max_tokens": 900},
    "/infill": {"n_predict": 900},
    "/v1/responses": {"max_output_tokens": 900, "top_logprobs": 20},
}
DEEP = b"[" * 200_000
MALFORMED = (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a": NaN}', DEEP, b'{"model": 5}', b'{"model": "\\ud800"}')
NEIGHBOUR = [9, 8, 7]
TOKENS = 150


@pytest.fixture
async def roomy() -> AsyncIterator[Endpoint]:
    limits = capacity(pages=4096, rows=32, step_tokens=64, max_model_len=1024)
    async with serving(executor=FakeExecutor(limits)) as endpoint:
        yield endpoint


@pytest.fixture
async def unharmed(roomy: Endpoint) -> AsyncIterator[Endpoint]:
    """Run a test beside a stream of another client; check its tokens, and that nothing is held afterwards."""
    beside = asyncio.create_task(roomy.complete(prompt=NEIGHBOUR, max_tokens=TOKENS, return_token_ids=True))
    yield roomy
    assert (await beside)["choices"][0]["token_ids"] == foretell(NEIGHBOUR, TOKENS)[0]
    again = await roomy.complete(prompt=NEIGHBOUR, max_tokens=TOKENS, return_token_ids=True)
    assert again["choices"][0]["token_ids"] == foretell(NEIGHBOUR, TOKENS)[0]
    await until(lambda: not roomy.engine.requests())
    await roomy.idle()
    status = roomy.engine.status()
    assert (status.pages_referenced, status.waiting_tokens, roomy.server.service.bodies_bytes) == (0, 0, 0)
    assert not list(roomy.server.service.streams)
    assert len(roomy.server.service.background) == 0


async def path_of(endpoint: Endpoint, path: str) -> str:
    if "{id}" not in path:
        return path
    _, conversation = await endpoint.post("/v1/conversations", {})
    return path.format(id=conversation["id"])


def send(endpoint: Endpoint, path: str, body: bytes, length: int | None = None, method: str = "POST") -> socket.socket:
    """Send a request with a small receive buffer, and do not read the response."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    client.sendall(head.encode() + body)
    client.setblocking(False)
    return client


def streamed(path: str) -> bytes:
    return json.dumps({**BODIES[path], **LONG[path], "seed": 0, "ignore_eos": True, "stream": True}).encode()


def test_every_route_that_reads_a_body_is_attacked():
    assert {*BODIES} == {operation.path for operation in OPERATIONS if operation.request is not None}
    assert {*LONG} == {*GENERATING}


@pytest.mark.parametrize("path", BODIES)
async def test_a_malformed_body_is_the_clients_error_in_the_routes_shape(unharmed: Endpoint, path: str):
    at = await path_of(unharmed, path)
    assert (await unharmed.post(at, {**BODIES[path], "max_tokens": 2, "max_output_tokens": 2}))[0] == 200
    for body in MALFORMED:
        if body == b'{"model": 5}' and "/conversations" in path:
            continue  # unknown to these routes
        status, answer = await unharmed.post(at, body)
        assert status == 400, (body[:20], answer)
        anthropic = path in ("/v1/messages", "/v1/messages/count_tokens")
        assert ("type" in answer) == anthropic
        error = answer["error"]
        assert error if isinstance(error, str) else error["message"]
    too_large = b" " * (unharmed.server.service.largest_body_bytes + 1)
    status, answer = await unharmed.post(at, too_large)
    assert status == 413, answer
    async with unharmed.session.post(at, data=b"{}", headers={"Content-Encoding": "gzip"}) as refused:
        assert refused.status == 400


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_vanishes_within_its_body_leaves_nothing(unharmed: Endpoint, path: str):
    at, body = await path_of(unharmed, path), json.dumps(BODIES[path]).encode()
    for share in (0, 1, len(body) - 1):
        client = send(unharmed, at, body[:share], len(body))
        if share:
            await until(lambda: unharmed.server.service.bodies_bytes > 0)
        client.close()
        await until(lambda: unharmed.server.service.bodies_bytes == 0)


@pytest.mark.parametrize("path", GENERATING)
async def test_a_client_that_vanishes_within_its_stream_ends_its_work(unharmed: Endpoint, path: str):
    before = len(unharmed.engine.requests())
    for _ in range(5):
        client = send(unharmed, path, streamed(path))
        await asyncio.get_running_loop().sock_recv(client, 1)
        client.close()
    await until(lambda: len(unharmed.engine.requests()) <= before)


@pytest.mark.parametrize("path", GENERATING)
async def test_a_client_that_vanishes_before_its_answer_ends_its_work(unharmed: Endpoint, path: str):
    whole = json.dumps({**BODIES[path], **LONG[path], "ignore_eos": True}).encode()
    before = len(unharmed.engine.requests())
    for _ in range(5):
        client = send(unharmed, path, whole)
        await until(lambda: len(unharmed.engine.requests()) > before)
        client.close()
        await until(lambda: len(unharmed.engine.requests()) <= before)


@pytest.mark.parametrize("path", GENERATING)
async def test_a_slow_reader_buffers_little_and_is_read_out_at_its_pace(unharmed: Endpoint, path: str):
    streams = unharmed.server.service.streams
    client = send(unharmed, path, streamed(path))
    received = await asyncio.get_running_loop().sock_recv(client, 100)
    for _ in range(3):
        assert await unharmed.complete(prompt=NEIGHBOUR, max_tokens=TOKENS)
        assert max((stream.buffered_bytes for stream in streams), default=0) <= 2 * sse.HIGH_WATER + 64
    while not received.endswith(b"0\r\n\r\n"):
        received += await asyncio.get_running_loop().sock_recv(client, 2**16)
    client.close()
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.exhaustive
async def test_readers_of_a_background_response_hold_up_neither_it_nor_each_other(unharmed: Endpoint):
    few = {"ignore_eos": True, "background": True, "top_logprobs": 4}
    asked = {**BODIES["/v1/responses"], **LONG["/v1/responses"], **few}
    status, response = await unharmed.post("/v1/responses", asked)
    assert status == 200, response
    path, loop = f"/v1/responses/{response['id']}", asyncio.get_running_loop()
    slow, *vanishing = [send(unharmed, f"{path}?stream=true", b"", method="GET") for _ in range(4)]
    received = await loop.sock_recv(slow, 100)
    for client in vanishing:
        await loop.sock_recv(client, 1)
        client.close()
    while len(unharmed.server.service.background):
        assert max(stream.buffered_bytes for stream in unharmed.server.service.streams) <= 2 * sse.HIGH_WATER + 64
        await asyncio.sleep(0)
    assert any(stream.buffered_bytes for stream in unharmed.server.service.streams)  # the slow reader lags
    async with unharmed.session.get(path) as answer:
        response = await answer.json()
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 900)
    while not received.endswith(b"0\r\n\r\n"):
        received += await loop.sock_recv(slow, 2**16)
    slow.close()
    assert received.count(b"event: response.output_text.delta") > 100
    assert b"event: response.incomplete" in received
