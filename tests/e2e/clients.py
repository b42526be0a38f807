"""Concurrent clients of a real daemon, and checks of its status.

`make soak` sets INFD_SOAK to 1 and runs the counts of SAFETY.md; otherwise counts are a hundredth.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infd.admin.ctl.client import AdminClient
from infd.admin.protocol import Status

if TYPE_CHECKING:
    from tests.e2e.process import Daemon

SHARE = float(os.environ.get("INFD_SOAK", "0.01"))
FULL = SHARE > 0.01  # also checks times


def scaled(count: int) -> int:
    """Return the scaled number of repetitions for SAFETY.md's `count`."""
    return max(2, round(count * SHARE))


class Neighbour:
    """A well-behaved stream, compared with the same stream alone."""

    def __init__(self, address: tuple[str, int], tokens: int) -> None:
        self._address = address
        self._body = {"prompt": "the neighbour", "max_tokens": tokens, "seed": 11, "ignore_eos": True, "stream": True}

    async def text(self) -> str:
        reader, writer = await ask(self._address, "/v1/completions", self._body)
        parts = []
        async for line in reader:
            if line.startswith(b"data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["text"])
            if line.startswith(b"data: [DONE]"):
                break
        writer.close()
        return "".join(parts)


async def ask(address: tuple[str, int], path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: infd\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


def vanish(writer: asyncio.StreamWriter) -> None:
    """Disconnect as a killed client does: the peer sees a reset."""
    no_time = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
    writer.transport.abort()


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def resident_kib(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def idle_status(daemon: Daemon) -> Status:
    """Return the daemon's status once all accepted requests have ended."""
    client = AdminClient([str(daemon.admin_socket)], timeout_s=60)
    for _ in range(10_000):
        status = client.get("/v1/status", Status)
        if status.accepted == sum(status.terminal.values()) and not (status.running or status.waiting):
            return status
    raise AssertionError(f"something is still served: {status}")
