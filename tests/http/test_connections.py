"""Limits on connections: number, time for headers and bodies, time to read a response."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from infd.config import Config, LiveConfig, ServerConfig
from infd.errors import Overloaded
from infd.http import app, connection, connections
from infd.http.connections import Connections, address_of
from infd.telemetry.metrics import Metrics
from tests.fakes import FakeExecutor, capacity
from tests.http.endpoint import Endpoint, serving
from tests.http.test_streaming import COMPLETIONS, LONG, held, raw, until


class Guest:
    def __init__(self, address: str = "a") -> None:
        self.address = address
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def house(most: int = 2, per_address: int = 2) -> Connections:
    bounds = ServerConfig(max_connections=most, max_connections_per_address=per_address)
    return Connections(LiveConfig(Config(server=bounds)), Metrics())


def test_at_the_limit_the_connection_idle_for_longest_is_closed():
    here, first, second, third = house(), Guest(), Guest(), Guest()
    here.enter(first)
    here.enter(second)
    here.mark_busy(first)
    here.mark_idle(first)  # the latest to become idle

    here.enter(third)

    assert [guest.dropped for guest in (first, second, third)] == [False, True, False]
    assert len(here) == 2


def test_where_all_are_in_use_the_newcomer_is_refused():
    here, first, second = house(), Guest(), Guest()
    for guest in (first, second):
        here.enter(guest)
        here.mark_busy(guest)

    with pytest.raises(Overloaded):
        here.enter(Guest())
    assert len(here) == 2
    assert not first.dropped
    assert not second.dropped


def test_an_address_at_its_limit_closes_one_of_its_own_connections():
    here, other, own = house(most=9, per_address=1), Guest("b"), Guest("a")
    here.enter(other)
    here.enter(own)

    here.enter(Guest("a"))

    assert own.dropped
    assert not other.dropped


def test_unix_sockets_are_of_no_address():
    here = house(most=9, per_address=1)
    guests = [Guest(""), Guest("")]
    for guest in guests:
        here.enter(guest)

    assert not any(guest.dropped for guest in guests)


def test_an_accepted_connection_is_unheard_until_its_request_or_close():
    some = house()
    asks, leaves = Guest(), Guest()
    some.enter(asks)
    some.enter(leaves)
    assert some.without_request == {asks, leaves}

    some.mark_busy(asks)
    some.mark_idle(asks)
    some.leave(leaves)
    assert not some.without_request


def test_a_closed_connection_is_not_counted():
    here, guest = house(per_address=1), Guest()
    here.enter(guest)
    here.leave(guest)
    here.leave(guest)
    here.mark_idle(guest)
    assert len(here) == 0

    busy = Guest()
    here.enter(busy)
    here.mark_busy(busy)
    with pytest.raises(Overloaded):
        here.enter(Guest())
    assert not guest.dropped


@pytest.mark.parametrize(
    ("peername", "address"),
    [
        (("192.0.2.7", 5), "192.0.2.7"),
        (("::ffff:192.0.2.7", 5, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3::4", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 3), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_an_address_is_a_host_or_an_ipv6_network(peername: object, address: str):
    assert address_of(peername) == address


@pytest.mark.parametrize(
    ("limit", "most"),
    [(1000, 1000 - connections.RESERVED_DESCRIPTORS), (64, 32), (1, 1), (resource.RLIM_INFINITY, 2**31)],
)
def test_the_process_holds_no_more_connections_than_it_has_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 10**6))

    assert connections.descriptor_limit() == most


def test_few_descriptors_count_for_more_than_the_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 10**6))
    here = house()
    here.enter(Guest())
    here.enter(Guest())

    assert len(here) == 1


def limited(**settings: Any) -> Config:
    return Config(server=ServerConfig(**settings))


async def connect(endpoint: Endpoint, sent: bytes = b"GET /readyz HTTP/1.1\r\nHost: ") -> socket.socket:
    host, port = endpoint.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    await asyncio.get_running_loop().sock_sendall(client, sent)
    return client


async def said(client: socket.socket) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    received = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):  # reached only if the test fails
        try:
            while data := await loop.sock_recv(client, 65536):
                received += data
        except ConnectionResetError:
            pass
    client.close()
    return received


async def test_two_thousand_connections_that_never_finish_their_headers_lock_out_no_client():
    async with serving(limited(max_connections=60, header_timeout_s=0.1)) as endpoint:
        metrics = endpoint.server.service.metrics
        for _ in range(20):
            slow = [await connect(endpoint) for _ in range(100)]
            async with endpoint.session.get("/readyz") as response:
                assert response.status == 200
            assert metrics.connections <= 60
            crowded = metrics.dropped["crowded"]
            assert [await said(client) for client in slow] == [b""] * 100

        assert crowded > 0
        assert metrics.dropped["slow_headers"] > 0


async def test_headers_that_never_end_are_not_waited_for_for_ever():
    async with serving(limited(header_timeout_s=0.02)) as endpoint:
        assert await said(await connect(endpoint)) == b""
        assert endpoint.server.service.metrics.dropped["slow_headers"] == 1


async def test_an_arrived_request_does_not_time_out_because_the_loop_is_late():
    async with serving(limited(header_timeout_s=1e-6)) as endpoint:
        with socket.create_connection(("127.0.0.1", urlsplit(endpoint.url).port)) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: infd\r\nConnection: close\r\n\r\n")
            reader, writer = await asyncio.open_connection(sock=client)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_the_deadline_of_headers_does_not_cut_a_request_short():
    executor = FakeExecutor(capacity(pages=512, rows=16, step_tokens=64, max_model_len=256))
    executor.gate.clear()
    async with serving(limited(header_timeout_s=0.05), executor=executor) as endpoint:
        asking = asyncio.create_task(endpoint.complete())
        slow = await connect(endpoint)  # connected later, dropped earlier
        await until(endpoint.engine.requests)
        assert await said(slow) == b""
        executor.gate.set()

        assert (await asking)["choices"]


async def test_a_connection_may_idle_only_so_long():
    async with serving(limited(idle_timeout_s=0.02)) as endpoint:
        answer = await said(await connect(endpoint, b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"))

    assert answer.startswith(b"HTTP/1.1 200")


async def test_beyond_the_limit_a_new_connection_gets_retry_after():
    async with held(config=limited(max_connections=1)) as endpoint:
        client = raw(endpoint, {"prompt": [5, 6, 7], "max_tokens": 5})
        await until(endpoint.engine.requests)

        head, _, body = (await said(await connect(endpoint))).partition(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"Retry-After: 1\r\n" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert endpoint.server.service.metrics.rejected == {"too_many_connections": 1}
        assert endpoint.engine.requests(), "an open request was dropped"
        client.close()


async def test_a_body_that_does_not_come_makes_room_too():
    async with serving(limited(max_connections=2)) as endpoint:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        slow = await connect(endpoint, head)
        slower = await connect(endpoint, head)
        await until(lambda: endpoint.server.service.bodies_bytes == 2)

        assert (await endpoint.complete())["choices"]
        assert await said(slow) == b""
        slower.close()


async def test_a_reader_that_stops_reading_a_whole_answer_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "STALL_S", 0.02)
    long = {"prompt": [5, 6, 7], "n": 8, "max_tokens": 250, "logprobs": 20, "seed": 0}
    async with serving() as endpoint:
        client = raw(endpoint, long)
        dropped = endpoint.server.service.metrics.dropped

        await until(lambda: dropped["slow_reader"])

        await until(lambda: endpoint.server.service.metrics.connections == 0)
        client.close()


@pytest.mark.parametrize("dropped_by", [connection, app], ids=["infd", "the kernel"])
async def test_a_reader_dropped_for_slowness_has_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dropped_by: Any
):
    caplog.set_level("INFO", "infd.access")
    monkeypatch.setattr(dropped_by, "STALL_S", 0.05)
    async with serving() as endpoint:
        metrics = endpoint.server.service.metrics
        client = raw(endpoint, {**LONG, "n": 4})

        await until(lambda: sum(metrics.terminal.values()) == 4)
        client.close()

    assert metrics.terminal["slow_reader"] == 4
    assert metrics.terminal["disconnect"] == 0
    assert metrics.dropped["slow_reader"] == 1
    (line,) = [vars(record) for record in caplog.records if record.name == "infd.access"]
    assert (line["status"], line["finish"]) == (499, "slow_reader")


async def test_a_body_may_take_longer_while_it_comes_at_a_pace():
    text = "a" * 200
    async with serving(limited(body_timeout_s=0.2, body_pace=1000)) as endpoint:
        data = msgspec.json.encode({"text": text * 20, "prompt": [5, 6, 7]})

        async def chunks() -> Any:
            for start in range(0, len(data), 400):  # each chunk extends the deadline by 0.4 s
                yield data[start : start + 400]
                await asyncio.sleep(0.03)

        async with endpoint.session.post(COMPLETIONS, data=chunks()) as response:
            assert response.status == 200


async def test_all_bodies_together_are_bounded_and_forgotten_once_decoded():
    async with serving(limited(max_bodies_bytes=4096)) as endpoint:
        service = endpoint.server.service
        assert (await endpoint.complete(text="x" * 3000))["choices"]
        assert service.bodies_bytes == 0
        slow = await connect(
            endpoint, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n" + b" " * 3000
        )
        await until(lambda: service.bodies_bytes == 3000)

        async with endpoint.session.post(COMPLETIONS, json={"prompt": "a", "text": "x" * 2000}) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["code"] == "too_many_bodies"

        slow.close()
        await until(lambda: service.bodies_bytes == 0)


async def test_unread_bytes_in_the_kernels_socket_buffer_have_a_deadline_too():
    async with serving() as endpoint, endpoint.session.get("/livez") as response:
        (listener,) = endpoint.server._listeners
        accepted = listener.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

        assert response.status == 200
        assert accepted == connection.STALL_S * 1000
