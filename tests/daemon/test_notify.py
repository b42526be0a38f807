"""Notifications to systemd."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from infd.daemon.notify import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        if request.param == "file":
            address = str(tmp_path / "notify")
            listening.bind(address)
        else:
            listening.bind("")  # the kernel picks an abstract name
            address = "@" + listening.getsockname()[1:].decode()
        listening.setblocking(False)
        yield listening, address


def test_each_state_is_one_datagram(manager: tuple[socket.socket, str]) -> None:
    listening, address = manager
    notifier = Notifier(address)

    notifier.more_time(1.5)
    notifier.ready("ready · 0 running")
    notifier.status("ready · 1 running")
    notifier.alive()
    notifier.stopping("draining")
    notifier.close()

    assert [listening.recv(4096).decode() for _ in range(5)] == [
        "EXTEND_TIMEOUT_USEC=1500000",
        "READY=1\nSTATUS=ready · 0 running",
        "STATUS=ready · 1 running",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=draining",
    ]


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier("")
    notifier.ready("ready")
    notifier.close()


def test_a_manager_that_is_gone_or_does_not_read_is_ignored(manager: tuple[socket.socket, str]) -> None:
    listening, address = manager
    notifier = Notifier(address)
    for _ in range(2000):  # more than a socket buffers
        notifier.alive()
    listening.close()
    notifier.alive()
    notifier.close()
