"""Clients behind reverse proxies."""

from __future__ import annotations

import asyncio
import logging
import struct
from contextlib import suppress

import pytest

from infd.config import Config, LiveConfig, ServerConfig
from infd.errors import ConfigError, InvalidHttp
from infd.http import proxies
from infd.http.proxies import Header, Proxies
from tests.http.endpoint import Endpoint, serving

V2 = b"\r\n\r\n\x00\r\nQUIT\n"
TCP4 = V2 + bytes((0x21, 0x11)) + struct.pack("!H4s4sHH", 12, bytes((203, 0, 113, 7)), bytes(4), 1, 2)
TCP6 = V2 + bytes((0x21, 0x21)) + struct.pack("!H16s16sHH", 36, bytes(15) + b"\x01", bytes(16), 1, 2)
LOCAL = V2 + bytes((0x20, 0x00)) + struct.pack("!H", 0)
WITH_EXTRAS = V2 + bytes((0x21, 0x11)) + struct.pack("!H4s4sHH", 15, bytes((203, 0, 113, 7)), bytes(4), 1, 2) + b"abc"
LINE = b"PROXY TCP4 203.0.113.7 10.0.0.1 1 2\r\n"
LINE6 = b"PROXY TCP6 ::1 ::2 1 2\r\n"
UNKNOWN = b"PROXY UNKNOWN anything else\r\n"


def trusting(*addresses: str, **settings: object) -> LiveConfig:
    return LiveConfig(Config(server=ServerConfig(trusted_proxies=addresses, **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "address"),
    [
        (TCP4, "203.0.113.7"),
        (TCP6, "::1"),
        (WITH_EXTRAS, "203.0.113.7"),
        (LINE, "203.0.113.7"),
        (LINE6, "::1"),
        (LOCAL, None),
        (UNKNOWN, None),
    ],
)
def test_a_header_is_read_once_it_is_whole(header: bytes, address: str | None) -> None:
    for length in range(len(header)):
        assert proxies.read(header[:length]) is None
    assert proxies.read(header + b"GET / HTTP/1.1") == Header(address, len(header))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"PROXY TCP4 203.0.113.7\r\n",
        b"PROXY TCP4 ::1 ::1 1 2\r\n",
        b"PROXY TCP4 nonsense 10.0.0.1 1 2\r\n",
        b"PROXY " + b"x" * 200,
        V2 + bytes((0x31, 0x11, 0, 12)) + bytes(12),
        V2 + bytes((0x21, 0x11, 0, 2)) + bytes(2),
        V2 + bytes((0x21, 0x11, 0xFF, 0xFF)),
    ],
)
def test_another_beginning_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidHttp):
        proxies.read(data)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.1.2.3", ["203.0.113.7"], "203.0.113.7"),
        ("10.1.2.3", ["6.6.6.6, 203.0.113.7, 10.9.9.9"], "203.0.113.7"),
        ("10.1.2.3", ["6.6.6.6", "203.0.113.7"], "203.0.113.7"),
        ("10.1.2.3", [], "10.1.2.3"),
        ("10.1.2.3", ["10.0.0.2"], "10.0.0.2"),
        ("10.1.2.3", ["203.0.113.7, forged"], "10.1.2.3"),
        ("192.0.2.1", ["203.0.113.7"], "192.0.2.1"),
        ("::ffff:10.1.2.3", ["2001:db8::1"], "2001:db8::1"),
        ("", ["203.0.113.7"], "203.0.113.7"),
    ],
)
def test_the_client_is_the_last_address_that_is_no_trusted_proxy(peer: str, forwarded: list[str], client: str) -> None:
    assert Proxies(trusting("10.0.0.0/8", "unix")).client(peer, forwarded) == client


def test_without_settings_no_proxy_is_trusted() -> None:
    assert Proxies(trusting()).client("10.1.2.3", ["203.0.113.7"]) == "10.1.2.3"


def test_a_malformed_network_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1/8"):
        proxies.networks(("10.0.0.1/8",))


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def logged_peer(endpoint: Endpoint, first: bytes, caplog: pytest.LogCaptureFixture, **headers: str) -> str:
    """Send a request whose connection begins with `first`; return the access line's peer."""
    caplog.clear()
    host, _, port = endpoint.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    for byte in first:
        writer.write(bytes((byte,)))
        await writer.drain()
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{lines}Connection: close\r\n\r\n".encode())
    answer = await reader.read()
    await closed(writer)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    (peer,) = [record.peer for record in caplog.records if record.name == "infd.access"]  # type: ignore[attr-defined]
    return str(peer)


async def test_the_log_names_the_client_behind_a_proxy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infd.access")
    forwarded = {"X-Forwarded-For": "203.0.113.7"}
    async with serving(trusting("127.0.0.1").now) as endpoint:
        assert await logged_peer(endpoint, b"", caplog, **forwarded) == "203.0.113.7"
    async with serving() as endpoint:
        assert await logged_peer(endpoint, b"", caplog, **forwarded) == "127.0.0.1"
    async with serving(trusting("127.0.0.1", proxy_protocol=True).now) as endpoint:
        for header in (TCP4, LINE):
            assert await logged_peer(endpoint, header, caplog) == "203.0.113.7"
        assert await logged_peer(endpoint, LOCAL, caplog) == "127.0.0.1"


async def test_a_client_behind_a_proxy_has_its_own_limit_of_connections() -> None:
    settings = trusting("127.0.0.1", proxy_protocol=True, max_connections_per_address=1)
    async with serving(settings.now) as endpoint:
        host, _, port = endpoint.url.removeprefix("http://").partition(":")

        async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"PROXY TCP4 {address} 10.0.0.1 1 2\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            return reader, writer

        first, first_writer = await connect("203.0.113.7")
        other, other_writer = await connect("203.0.113.8")
        again, again_writer = await connect("203.0.113.7")

        assert await first.read() == b"", "the longest idle connection of this client made room"
        other_writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await other.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        for writer in (first_writer, other_writer, again_writer):
            await closed(writer)
        assert again is not None


async def test_a_connection_without_the_header_is_dropped_and_counted() -> None:
    async with serving(trusting("127.0.0.1", proxy_protocol=True).now) as endpoint:
        host, _, port = endpoint.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        await closed(writer)
        assert endpoint.server.service.metrics.dropped["bad_proxy_header"] == 1
