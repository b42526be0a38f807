"""Recent and new events, over the admin socket and with `infdctl events`."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from infd.admin import feed, protocol
from tests.admin.test_ctl import infdctl
from tests.admin.test_server import ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from tests.admin.conftest import AdminEngine

TARGET = "http://infd/v1/events"


@asynccontextmanager
async def reading(backend: AdminEngine, query: str = "") -> AsyncIterator[aiohttp.StreamReader]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(backend.socket))) as session,
        session.get(TARGET + query) as response,
    ):
        assert (response.status, response.content_type) == (200, protocol.FEED_TYPE)
        yield response.content


def decoded(lines: bytes | str) -> list[protocol.Event]:
    decoder = msgspec.json.Decoder(protocol.Event, strict=True)
    return [decoder.decode(line) for line in lines.splitlines()]


def at(backend: AdminEngine, *arguments: str) -> Any:
    return infdctl("--socket", backend.socket, *arguments)


async def test_events_name_the_caller_the_verb_and_the_outcome(backend: AdminEngine) -> None:
    async with backend.loaded():
        await ask(backend.socket, "POST", "/v1/pause", json={"mode": "keep"})
        await ask(backend.socket, "POST", "/v1/requests/nobody/abort")
        code, out, err = await at(backend, "events", "--json")
        _, shown, _ = await at(backend, "events", "--since", "2")
    assert code == 0, err
    events = decoded(out)
    assert [(event.seq, event.kind, event.message) for event in events] == [
        (1, "state", "ready"),
        (2, "state", "paused"),
        (3, "rest", "paused"),
        (4, "verb", "pause"),
        (5, "verb", "abort"),
    ]
    assert "frozen" in str(events[1].facts["reason"])
    assert events[2].facts["mode"] == "keep"
    assert events[3].facts["uid"] == os.geteuid()
    assert (events[3].facts["result"], events[4].facts["result"]) == ("done", "unknown_request")
    assert '"nobody"' in str(events[4].facts["asked"])
    lines = shown.splitlines()
    assert len(lines) == 3
    assert "verb    pause" in lines[1]
    assert f"uid={os.geteuid()}" in lines[1]


async def test_a_follower_reads_events_until_the_daemon_ends(backend: AdminEngine) -> None:
    async with backend.loaded(), reading(backend, "?follow=true&since=1") as lines:
        for verb, told in (("pause", ["paused", "paused", "pause"]), ("resume", ["ready", "ready", "resume"])):
            await ask(backend.socket, "POST", f"/v1/{verb}")
            assert [decoded(await lines.readline())[0].message for _ in told] == told
        await backend.admin.close()
        assert await lines.read() == b""


async def test_infdctl_follows_and_ends_with_the_daemon(backend: AdminEngine) -> None:
    async with backend.loaded():
        following = asyncio.create_task(at(backend, "events", "--follow", "--json"))
        while not backend.admin.feeds.open:
            await asyncio.sleep(0)
        await ask(backend.socket, "POST", "/v1/pause")
        await backend.admin.close()
        code, out, err = await following
    assert (code, err) == (0, "")
    assert [event.message for event in decoded(out)] == ["ready", "paused", "paused", "pause"]


async def test_dropped_events_are_counted(backend: AdminEngine) -> None:
    events = backend.engine.events
    for _ in range(1030):
        events.publish("step", "failed")
    code, out, err = await at(backend, "events", "--json", "--since", "2")
    assert code == 0
    assert [(event.seq, event.dropped) for event in decoded(out)][:2] == [(7, 4), (8, 0)]
    _, _, err = await at(backend, "events", "--since", "2")
    assert "4 events before this one are forgotten" in err


async def test_a_disconnected_reader_is_removed_even_without_events(backend: AdminEngine) -> None:
    async with reading(backend, "?follow=true"):
        assert backend.admin.feeds.open == 1
    while backend.admin.feeds.open or backend.admin.connections:
        await asyncio.sleep(0)


async def test_a_stalled_reader_is_dropped_and_others_read_on(
    backend: AdminEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WRITE_TIMEOUT_S", 0.01)
    events = backend.engine.events
    loop = asyncio.get_running_loop()
    stalled = socket.socket(socket.AF_UNIX)
    stalled.setblocking(False)
    await loop.sock_connect(stalled, str(backend.socket))
    await loop.sock_sendall(stalled, b"GET /v1/events?follow=true HTTP/1.1\r\nHost: infd\r\n\r\n")
    while not backend.admin.feeds.open:
        await asyncio.sleep(0)
    async with reading(backend, "?follow=true") as lines:
        sent = 0
        while backend.admin.feeds.open > 1:  # the size of socket buffers is unknown
            events.publish("step", "failed", **{name: name * 250 for name in "abcdefghij"})
            sent += 1
            await lines.readline()
        assert sent * 2500 < 2**21
        events.publish("step", "stuck")
        assert decoded(await lines.readline())[0].message == "stuck"
    stalled.close()


async def test_followers_are_bounded_and_other_verbs_are_still_served(
    backend: AdminEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_SUBSCRIBERS", 2)
    async with reading(backend, "?follow=true"), reading(backend, "?follow=true"):
        status, body = await ask(backend.socket, "GET", "/v1/events")
        assert (status, body["code"]) == (429, "crowded")
        assert (await ask(backend.socket, "GET", "/v1/status"))[0] == 200
    while backend.admin.feeds.open:
        await asyncio.sleep(0)
    async with reading(backend) as lines:
        assert await lines.read() == b""


async def test_an_invalid_query_is_refused(backend: AdminEngine) -> None:
    for query in ("?since=-1", "?follow=perhaps", "?nonsense=1"):
        status, body = await ask(backend.socket, "GET", f"/v1/events{query}")
        assert (status, body["code"]) == (400, "bad_request")
        assert "since, follow" in body["detail"]
