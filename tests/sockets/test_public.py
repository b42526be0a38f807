"""Addresses and sockets on which the endpoint can listen."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from infd.config import ServerConfig
from infd.errors import AddressUnavailable, ConfigError, StartError
from infd.sockets.public import PublicSockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


@pytest.fixture
def listen() -> Iterator[object]:
    made: list[PublicSockets] = []

    def listen(*hosts: str, **settings: object) -> PublicSockets:
        made.append(PublicSockets.bind(ServerConfig(host=hosts, **{"port": 0, **settings})))  # type: ignore[arg-type]
        return made[-1]

    yield listen
    for listening in made:
        for listener in listening.sockets:
            listener.close()
        listening.close()


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


@pytest.mark.parametrize(
    ("host", "begins"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "http://localhost:"),
        pytest.param("::1", "http://[::1]:", marks=needs_ipv6),
        pytest.param("[::1]", "http://[::1]:", marks=needs_ipv6),
        pytest.param("::", "http://localhost:", marks=needs_ipv6),
    ],
)
def test_the_address_is_one_that_a_client_can_use(listen, host: str, begins: str) -> None:
    assert listen(host).url.startswith(begins)


@pytest.mark.parametrize(
    ("host", "begins", "beyond"),
    [
        ("127.0.0.2", "http://127.0.0.2:", False),
        ("0.0.0.0", "http://0.0.0.0:", True),
        pytest.param("::1", "http://[::1]:", False, marks=needs_ipv6),
        pytest.param("::", "http://[::]:", True, marks=needs_ipv6),
    ],
)
def test_the_logged_address_is_the_bound_one(listen, host: str, begins: str, beyond: bool) -> None:
    listening = listen(host)

    assert listening.addresses[0].startswith(begins)
    assert listening.reachable_from_outside == (listening.addresses if beyond else [])


def test_several_hosts_share_the_port_that_the_first_one_picked(listen) -> None:
    listening = listen("127.0.0.1", "127.0.0.2")

    assert len({port_of(url) for url in listening.addresses}) == 1
    assert port_of(listening.addresses[0]) != "0"


@needs_ipv6
@pytest.mark.parametrize("hosts", [("0.0.0.0", "::"), ("::", "0.0.0.0")])
def test_both_wildcards_can_be_bound(listen, hosts: tuple[str, ...]) -> None:
    first, second = listen(*hosts).addresses

    assert port_of(first) == port_of(second)


@needs_ipv6
def test_the_ipv6_wildcard_alone_takes_ipv4_as_well(listen) -> None:
    (listener,) = listen("::").sockets
    listener.listen()

    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        pass


def test_a_unix_host_is_a_socket_with_the_mode_asked_for(listen, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    listening = listen(f"unix:{path}", "127.0.0.1", unix_mode="0666")

    assert listening.addresses[0] == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666

    listening.close()
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced_and_a_live_one_is_not(listen, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listen(f"unix:{path}")

    with pytest.raises(StartError, match=rf"pid {os.getpid()}\) serves the socket .*--host"):
        listen(f"unix:{path}")
    assert path.is_socket()


def test_an_address_of_another_machine_is_refused(listen) -> None:
    with pytest.raises(AddressUnavailable, match=r"cannot listen on 192\.0\.2\.1 port 80"):
        listen("192.0.2.1", port=80)


def test_earlier_hosts_are_closed_when_a_later_one_fails(listen, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(AddressUnavailable):
        listen(f"unix:{tmp_path}/http.sock", "127.0.0.1", "192.0.2.1", port=port)
    with pytest.raises(ConfigError, match="not a socket"):
        listen("127.0.0.1", f"unix:{tmp_path}", port=port)

    assert not (tmp_path / "http.sock").exists()
    listen("127.0.0.1", port=port)
