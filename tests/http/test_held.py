"""The contents of large answers are bounded together by kind, from before they are computed until they are sent."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Struct

from infd.config import Config, SchedulerConfig
from infd.http.formats.base import ENTRY_BYTES
from infd.http.held import SMALL_BYTES
from tests.fakes import EXPERTS, FakeExecutor, capacity
from tests.http.endpoint import serving
from tests.http.test_streaming import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.http.held import HeldBytes
    from tests.http.endpoint import Endpoint

TOKENS = 200  # of each prompt


class Kind(Struct, frozen=True):
    """One kind of contents.

    inputs       prompts of an answer that the sockets' buffers do not hold
    token_bytes  bytes that the answer may hold for each token of a prompt, and each of `generated` more
    """

    counter: str
    setting: str
    path: str
    body: dict[str, Any]
    inputs: int
    token_bytes: int
    generated: int = 0

    @property
    def size(self) -> int:
        return self.inputs * (TOKENS + self.generated) * self.token_bytes

    def asked(self, inputs: int | None = None) -> dict[str, Any]:
        field = "input" if self.path == "/pooling" else "prompt"
        return {**self.body, field: [[5] * TOKENS] * (inputs or self.inputs)}

    @asynccontextmanager
    async def narrow(self) -> AsyncIterator[tuple[Endpoint, HeldBytes]]:
        """Run an endpoint that holds one large answer beside no other, and whose model computes nothing yet."""
        executor = FakeExecutor(capacity(pages=4096, rows=64, step_tokens=4096, max_model_len=256))
        executor.gate.clear()
        async with serving(Config(scheduler=SchedulerConfig(**{self.setting: self.size})), executor=executor) as narrow:
            yield narrow, getattr(narrow.server.service.held, self.counter)


COMPLETIONS = "/v1/completions"
KINDS = [
    Kind("numbers", "max_pooled_bytes", "/pooling", {"task": "token_embed"}, 200, 4),
    Kind(
        "prompt_logprobs",
        "max_prompt_logprobs_bytes",
        COMPLETIONS,
        {"max_tokens": 1, "prompt_logprobs": 1},
        20,
        2 * ENTRY_BYTES,
    ),
    Kind(
        "experts",
        "max_routed_bytes",
        COMPLETIONS,
        {"max_tokens": 1, "n": 2, "return_routed_experts": True},
        75,
        2 * EXPERTS.token_bytes,
        generated=1,
    ),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.counter for kind in KINDS])


@asynccontextmanager
async def unread(endpoint: Endpoint, kind: Kind) -> AsyncIterator[socket.socket]:
    """Send a request on a socket from which the server can write little ahead."""
    loop, body = asyncio.get_running_loop(), json.dumps(kind.asked()).encode()
    host, port = endpoint.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, (host, int(port)))
        head = f"POST {kind.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(client, head.encode() + body)
        yield client


@each_kind
async def test_large_answers_are_bounded_together_and_small_ones_are_not(kind: Kind):
    async with kind.narrow() as (narrow, counter):
        first = asyncio.create_task(narrow.post(kind.path, kind.asked()))
        await until(lambda: counter.size == kind.size > SMALL_BYTES)

        async with narrow.session.post(kind.path, json=kind.asked()) as refused:
            error = (await refused.json())["error"]
            assert (refused.status, error["type"], error["code"]) == (429, "overloaded_error", "queue_full")
            assert refused.headers["Retry-After"] == "1"
        assert f"scheduler.{kind.setting}" in error["message"]
        assert error["message"].endswith("need fewer")
        small = asyncio.create_task(narrow.post(kind.path, kind.asked(1)))
        narrow.executor.gate.set()

        assert (await first)[0] == (await small)[0] == 200
        assert (await narrow.post(kind.path, kind.asked(kind.inputs + 1)))[0] == 200, (
            "alone, an answer is never too large"
        )
        await until(lambda: counter.size == 0)


@each_kind
async def test_a_request_that_ends_without_an_answer_holds_nothing(kind: Kind):
    async with kind.narrow() as (narrow, counter):
        leaving = asyncio.create_task(narrow.post(kind.path, kind.asked()))
        await until(lambda: counter.size == kind.size)
        leaving.cancel()
        await until(lambda: counter.size == 0)


@pytest.mark.parametrize("reads", [False, True])
@each_kind
async def test_an_answer_holds_its_contents_until_it_is_sent_or_dropped(kind: Kind, reads: bool):
    async with kind.narrow() as (narrow, counter):
        narrow.executor.gate.set()
        async with unread(narrow, kind) as client:
            loop, begun = asyncio.get_running_loop(), await asyncio.get_running_loop().sock_recv(client, 100)
            assert begun.startswith(b"HTTP/1.1 200 OK")
            assert not narrow.engine.requests(), "the ticket has ended"
            assert counter.size == kind.size
            assert (await narrow.post(kind.path, kind.asked()))[0] == 429
            while reads and await loop.sock_recv(client, 2**16):
                pass
            if reads:
                await until(lambda: counter.size == 0)
        await until(lambda: counter.size == 0)
        assert (await narrow.post(kind.path, kind.asked()))[0] == 200


@pytest.mark.parametrize("kind", KINDS[1:], ids=[kind.counter for kind in KINDS[1:]])
async def test_a_stream_holds_its_contents_until_its_end(kind: Kind):
    async with kind.narrow() as (narrow, counter):
        streaming = asyncio.create_task(narrow.events(kind.path, kind.asked()))
        await until(lambda: counter.size == kind.size)
        assert (await narrow.post(kind.path, {**kind.asked(), "stream": True}))[0] == 429
        narrow.executor.gate.set()
        await streaming
        await until(lambda: counter.size == 0)
