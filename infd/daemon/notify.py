"""What systemd is told: datagrams of NAME=value lines to $NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import socket


class Notifier:
    """Speaks to the service manager, or to nobody when there is none."""

    def __init__(self, address: str) -> None:
        self._socket: socket.socket | None = None
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, *lines: str) -> None:
        if self._socket is not None:
            # A manager that is gone or busy must not take the service down; it judges by what does arrive.
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)

    def ready(self, status: str) -> None:
        self.send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self.send(f"STATUS={status}")

    def stopping(self, status: str) -> None:
        self.send("STOPPING=1", f"STATUS={status}")

    def alive(self) -> None:
        self.send("WATCHDOG=1")

    def more_time(self, seconds: float) -> None:
        """Ask for `seconds` from now before the start (or stop) counts as failed."""
        self.send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
