"""Limit the number of connections, and choose which one is dropped for a new one.

A connection is silent while the server waits for its client: for the headers or the body of a request, or for the next
request. At a cap the connection silent for longest is dropped for the new one, so that clients that open connections
and send nothing keep no other client out. If none is silent, the new one is refused.
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

# Descriptors for everything else: weights, caches, the admin socket, logs, the event loop; at most half of all.
KEPT_DESCRIPTORS: Final = 128
# Prefix that a customer usually gets in IPv6: one client can use all its addresses.
SHARED_PREFIX: Final = 64


class Droppable(Protocol):
    """A connection."""

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
        self._at: dict[str, int] = {}  # number open, by address
        self._open: set[Droppable] = set()
        self.unheard: set[Droppable] = set()  # open, without a request so far
        self._silent: dict[Droppable, None] = {}  # silent for longest first
        self._silent_at: dict[str, dict[Droppable, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Droppable) -> None:
        """Add a new connection, which is silent at first. Raises Overloaded if there is no room for it."""
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
        """Remove a connection. Harmless when repeated."""
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
        """Note that the server waits for the client."""
        if connection in self._open:
            self._silent[connection] = None
            self._silent_at.setdefault(connection.address, {})[connection] = None

    def busy(self, connection: Droppable) -> None:
        """Note that the server works for the client."""
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
    """Return the address that limits count by: a host, or an IPv6 network; empty for a Unix socket."""
    if not isinstance(peername, tuple):
        return ""
    address = ipaddress.ip_address(peername[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, SHARED_PREFIX), strict=False))


def descriptors() -> int:
    """Return how many connections this process may hold open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft - KEPT_DESCRIPTORS, soft // 2, 1)
