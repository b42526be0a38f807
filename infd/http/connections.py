"""Limit the number of connections, and choose the connection to drop for a new connection.

A connection is silent while the server waits for its client: for the headers or the body of a request, or for the next
request. At a cap the server drops the connection that has been silent for longest, so that idle connections keep no
client out. If no connection is silent, the server refuses the new connection.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
from typing import TYPE_CHECKING, Final, Protocol

from infd.errors import Overloaded

if TYPE_CHECKING:
    from infd.config import ServerConfig
    from infd.telemetry.metrics import Metrics

_LOG = logging.getLogger("infd.http")

# File descriptors reserved for weights, caches, the admin socket, logs and the event loop; at most half of all.
KEPT_DESCRIPTORS: Final = 128
# Providers usually assign a customer one IPv6 prefix of this length; one client can use all of its addresses.
SHARED_PREFIX: Final = 64


class Droppable(Protocol):
    """A connection, as `Connections` sees it."""

    address: str  # empty for a Unix socket

    def drop(self) -> None:
        """Abort the connection."""


class Connections:
    """All open connections, within the caps of the settings and of the process."""

    def __init__(self, server: ServerConfig, metrics: Metrics) -> None:
        self._most = min(server.max_connections, descriptors())
        if self._most < server.max_connections:
            _LOG.warning(
                "at most %d connections at once instead of %d: the limit of open files (ulimit -n) is low",
                self._most,
                server.max_connections,
            )
        self._most_per_address = server.max_connections_per_address
        self._metrics = metrics
        self._at: dict[str, int] = {}  # number of open connections, by address
        self._open: set[Droppable] = set()
        self.unheard: set[Droppable] = set()  # open, without a request so far
        self._silent: dict[Droppable, None] = {}  # silent for longest first
        self._silent_at: dict[str, dict[Droppable, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Droppable) -> None:
        """Add a new connection, silent at first. Raises Overloaded if a cap is reached and no connection is silent."""
        address = connection.address
        if address and self._at.get(address, 0) >= self._most_per_address:
            self._make_room(self._silent_at.get(address), "your address has too many connections, all of them in use")
        if len(self._open) >= self._most:
            self._make_room(self._silent, "there are too many connections, all of them in use")
        self._open.add(connection)
        self.unheard.add(connection)
        self._at[address] = self._at.get(address, 0) + 1
        self.silent(connection)
        self._metrics.connections = len(self._open)

    def leave(self, connection: Droppable) -> None:
        """Remove a connection. A repeated call does nothing."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        self.busy(connection)
        address = connection.address
        self._at[address] -= 1
        if not self._at[address]:
            del self._at[address]
        self._metrics.connections = len(self._open)

    def silent(self, connection: Droppable) -> None:
        """Record that the server waits for the connection's client."""
        if connection in self._open:
            self._silent[connection] = None
            self._silent_at.setdefault(connection.address, {})[connection] = None

    def busy(self, connection: Droppable) -> None:
        """Record that the server works for the connection's client."""
        self.unheard.discard(connection)
        if connection in self._silent:
            del self._silent[connection]
            here = self._silent_at[connection.address]
            del here[connection]
            if not here:
                del self._silent_at[connection.address]

    def _make_room(self, silent: dict[Droppable, None] | None, complaint: str) -> None:
        if not silent:
            raise Overloaded(complaint, code="too_many_connections")
        longest = next(iter(silent))
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


def descriptors() -> int:
    """Return the maximum number of connections that the limit of open files permits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft - KEPT_DESCRIPTORS, soft // 2, 1)
