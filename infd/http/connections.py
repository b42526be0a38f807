"""Limit the number of connections, and choose the connection to drop for a new connection.

A connection is idle while the server waits for its client: for the headers or the body of a request, or for the next
request. At a cap the server drops the connection that has been idle longest, so that idle connections exclude no
client. If no connection is idle, the server refuses the new connection.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
from typing import TYPE_CHECKING, Final, Protocol

from infd.errors import Overloaded

if TYPE_CHECKING:
    from infd.config import LiveConfig
    from infd.telemetry.metrics import Metrics

_LOG = logging.getLogger("infd.http")

# File descriptors reserved for weights, caches, the admin socket, logs and the event loop; at most half of the limit.
RESERVED_DESCRIPTORS: Final = 128
# Providers usually assign a customer one IPv6 prefix of this length, so that one client can use all its addresses.
SHARED_PREFIX: Final = 64


class Droppable(Protocol):
    """The members of a connection that `Connections` uses."""

    address: str  # empty for a Unix socket

    def drop(self) -> None:
        """Abort the connection."""


class Connections:
    """All open connections, at most as many as the settings and the process's limit of open files permit."""

    def __init__(self, live: LiveConfig, metrics: Metrics) -> None:
        self._live = live
        self._descriptors = descriptor_limit()
        if self._descriptors < (configured := live.now.server.max_connections):
            _LOG.warning(
                "at most %d connections at once instead of %d: the limit of open files (ulimit -n) is low",
                self._descriptors,
                configured,
            )
        self._metrics = metrics
        self._open_at_address: dict[str, int] = {}  # number of open connections, by address
        self._open: set[Droppable] = set()
        self.without_request: set[Droppable] = set()  # open connections that have not sent a request
        self._idle: dict[Droppable, None] = {}  # idle connections, longest idle first
        self._idle_at_address: dict[str, dict[Droppable, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Droppable) -> None:
        """Add a new connection, idle at first. Raises Overloaded if a cap is reached and no connection is idle."""
        address, server = connection.address, self._live.now.server
        if address and self._open_at_address.get(address, 0) >= server.max_connections_per_address:
            self._drop_longest_idle(
                self._idle_at_address.get(address), "your address has too many connections, all of them in use"
            )
        if len(self._open) >= min(server.max_connections, self._descriptors):
            self._drop_longest_idle(self._idle, "there are too many connections, all of them in use")
        self._open.add(connection)
        self.without_request.add(connection)
        self._open_at_address[address] = self._open_at_address.get(address, 0) + 1
        self.mark_idle(connection)
        self._metrics.connections = len(self._open)

    def leave(self, connection: Droppable) -> None:
        """Remove a connection. A repeated call does nothing."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        self.mark_busy(connection)
        address = connection.address
        self._open_at_address[address] -= 1
        if not self._open_at_address[address]:
            del self._open_at_address[address]
        self._metrics.connections = len(self._open)

    def mark_idle(self, connection: Droppable) -> None:
        """Record that the server waits for the connection's client."""
        if connection in self._open:
            self._idle[connection] = None
            self._idle_at_address.setdefault(connection.address, {})[connection] = None

    def mark_busy(self, connection: Droppable) -> None:
        """Record that the server works for the connection's client."""
        self.without_request.discard(connection)
        if connection in self._idle:
            del self._idle[connection]
            idle = self._idle_at_address[connection.address]
            del idle[connection]
            if not idle:
                del self._idle_at_address[connection.address]

    def _drop_longest_idle(self, idle: dict[Droppable, None] | None, message: str) -> None:
        if not idle:
            raise Overloaded(message, code="too_many_connections")
        longest = next(iter(idle))
        self.leave(longest)
        self._metrics.dropped["crowded"] += 1
        longest.drop()


def address_of(peername: object) -> str:
    """Return the address by which connections are counted: IPv4 host or IPv6 network; empty for a Unix socket."""
    if not isinstance(peername, tuple):
        return ""
    address = ipaddress.ip_address(peername[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, SHARED_PREFIX), strict=False))


def descriptor_limit() -> int:
    """Return the maximum number of connections that the limit of open files permits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft - RESERVED_DESCRIPTORS, soft // 2, 1)
