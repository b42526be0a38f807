"""Send systemd NAME=value datagrams at $NOTIFY_SOCKET (sd_notify(3))."""

from __future__ import annotations

import contextlib
import socket
import time


class Notifier:
    """Sends messages to the service manager's socket `address`, and nothing if `address` is empty."""

    def __init__(self, address: str) -> None:
        self._socket: socket.socket | None = None
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, *lines: str) -> None:
        """Send one datagram of NAME=value lines; ignore errors."""
        if self._socket is not None:
            # An absent or busy manager must not end the daemon. A lost watchdog ping causes at worst a restart.
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)

    def ready(self, status: str) -> None:
        self.send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Announce a reload; `ready` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def status(self, status: str) -> None:
        self.send(f"STATUS={status}")

    def stopping(self, status: str) -> None:
        self.send("STOPPING=1", f"STATUS={status}")

    def alive(self) -> None:
        self.send("WATCHDOG=1")

    def more_time(self, seconds: float) -> None:
        """Extend systemd's timeout for the start or stop in progress, to `seconds` from now."""
        self.send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
