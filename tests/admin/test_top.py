"""The frames of `top` over the admin socket, and `infdctl top` without a terminal."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from infd.admin import items, protocol
from tests.admin.test_ctl import infdctl
from tests.admin.test_server import ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.admin.conftest import AdminEngine


@asynccontextmanager
async def reading(backend: AdminEngine, query: str = "", limit: int = 2**16) -> AsyncIterator[aiohttp.StreamReader]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(backend.socket)), read_bufsize=limit) as session,
        session.get(f"http://infd/v1/top{query}") as response,
    ):
        assert (response.status, response.content_type) == (200, protocol.FEED_TYPE)
        yield response.content


def decoded(line: bytes | str) -> items.Frame:
    return msgspec.json.decode(line, type=items.Frame, strict=True)


async def test_frames_are_numbered_and_show_the_daemon_and_its_requests(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (request_id, _):
        backend.engine.metrics.rejected["rate_limit_exceeded"] = 3
        backend.engine.metrics.ttft.observe(0.2)
        async with reading(backend, "?frames=2&interval_s=0.1") as lines:
            first, second = decoded(await lines.readline()), decoded(await lines.readline())
            assert await lines.read() == b""
        _, now = await ask(backend.socket, "GET", "/v1/status")

    assert [(each.seq, each.dropped) for each in (first, second)] == [(1, 0), (2, 0)]
    assert second.time - first.time > 0.05
    assert (first.status.state, first.status.model, first.status.pages) == ("ready", "embedded", now["pages"])
    assert [row.id for row in first.requests] == [request_id]
    assert (first.requests[0].client, first.requests_total) == ("tester", 1)
    assert first.rejected == {"rate_limit_exceeded": 3}
    assert first.recent.ttft.count == 1
    assert first.process.memory_bytes > 2**20
    assert 3 < first.process.files < first.process.most_files


async def test_the_oldest_waiting_request_is_timed_and_rows_are_bounded(backend: AdminEngine) -> None:
    async with (
        backend.loaded(),
        backend.engine.admit(1, 10) as oldest,
        backend.engine.admit(1, 10),
        reading(backend, "?frames=1&rows=1") as lines,
    ):
        frame = decoded(await lines.readline())

    assert (len(frame.requests), frame.requests_total, frame.requests[0].state) == (1, 2, "admitted")
    assert frame.requests[0].id == oldest.id
    assert frame.oldest_waiting_s is not None
    assert 0 < frame.oldest_waiting_s <= frame.requests[0].age_s


async def test_for_a_reader_that_stops_no_frames_are_computed_and_it_learns_how_many(backend: AdminEngine) -> None:
    long = {f"reason {number}": number for number in range(50_000)}  # more than the buffers of a socket
    backend.engine.metrics.rejected.update(long)
    reader, writer = await asyncio.open_unix_connection(str(backend.socket), limit=2**12)
    writer.write(b"GET /v1/top?interval_s=0.1 HTTP/1.1\r\nHost: infd\r\n\r\n")
    stopped = asyncio.get_running_loop().time() + 0.45
    while asyncio.get_running_loop().time() < stopped:
        assert (await ask(backend.socket, "GET", "/v1/status"))[0] == 200
    head = await reader.readuntil(b"\r\n\r\n")
    first, second = [decoded(await chunk(reader)) for _ in range(2)]
    writer.close()

    assert b"chunked" in head
    assert (first.seq, first.dropped) == (1, 0)
    assert second.dropped >= 3
    assert second.seq == 2 + second.dropped


async def chunk(reader: asyncio.StreamReader) -> bytes:
    """Read a chunk of HTTP's transfer coding: the server sends each frame as one."""
    piece = await reader.readexactly(int(await reader.readline(), 16))
    await reader.readline()
    return piece


async def test_a_subscription_ends_with_the_daemon(backend: AdminEngine) -> None:
    async with reading(backend, "?interval_s=60") as lines:
        assert decoded(await lines.readline()).status.state == "starting"
        await backend.admin.close()
        assert await lines.read() == b""


async def test_without_a_terminal_a_frame_is_printed_as_text(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (request_id, _):
        (code, out, err), (json_code, json, _) = await asyncio.gather(
            infdctl("--socket", backend.socket, "top", COLUMNS="100"),
            infdctl("--socket", backend.socket, "top", "--once", "--json"),
        )

    assert (code, err, json_code) == (0, "", 0)
    assert out.startswith("embedded  ready ")
    assert request_id in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert [row.id for row in decoded(json).requests] == [request_id]
